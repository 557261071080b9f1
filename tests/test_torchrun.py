"""Two torchrun agents on one host, as two nodes would be."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from lightning.pytorch import Callback

from benchmarks._subprocess import ROOT
from lightrl import RLModule
from tests.helpers.fits import quiet_trainer, share_of_even_words, tiny_data
from tests.helpers.processes import free_port
from tests.helpers.tiny import tiny_model, tiny_prompts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

LEARNED = 40


class Rewards(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.is_global_zero:
            with (self.folder / "rewards").open("a") as file:
                file.write(f"{float(trainer.callback_metrics['reward/mean'])}\n")


def main(folder: str) -> None:
    trainer = quiet_trainer("colocated_hf", num_nodes=2, devices=1, max_epochs=-1, callbacks=[Rewards(Path(folder))])
    data = tiny_data(tiny_prompts(8), reward=share_of_even_words, prompts_per_step=8, group_size=8)
    trainer.fit(RLModule(tiny_model(), lr=3e-3), data)


@contextmanager
def agents(folder: Path) -> Iterator[list[subprocess.Popen[str]]]:
    address = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    started = []
    for node in range(2):
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node), *address]
        command += ["--nproc-per-node", "1", "-m", "tests.test_torchrun", str(folder)]
        log = (folder / f"agent{node}.log").open("w")
        started.append(
            subprocess.Popen(command, cwd=ROOT, env=os.environ, stdout=log, stderr=log, text=True, process_group=0)
        )
    try:
        yield started
    finally:
        for process in ours(folder):
            process.kill()
        for agent in started:
            agent.wait()


def ours(folder: Path) -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if str(folder) in (p.info["cmdline"] or [])]


def wait_for(what: Any, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not what() and time.monotonic() < deadline:
        time.sleep(0.2)
    return bool(what())


@pytest.mark.parametrize("killed", [0, 1])
def test_two_agents_start_learn_and_end_loudly_when_one_is_killed(killed: int, tmp_path: Path) -> None:
    def rewards() -> list[float]:
        path = tmp_path / "rewards"
        return [float(line) for line in path.read_text().splitlines()] if path.exists() else []

    with agents(tmp_path) as both:
        assert wait_for(lambda: len(rewards()) >= LEARNED, 240), (tmp_path / "agent0.log").read_text()[-3000:]
        assert sum(rewards()[-5:]) > sum(rewards()[:5]) + 0.5
        os.kill(both[killed].pid, signal.SIGKILL)
        assert wait_for(lambda: not ours(tmp_path), 30), "processes are left"
        assert both[1 - killed].wait() != 0
    said = (tmp_path / "agent0.log").read_text() + (tmp_path / "agent1.log").read_text()
    assert f"rank {killed} lost the torchrun agent that started it" in said


if __name__ == "__main__":
    main(sys.argv[1])
