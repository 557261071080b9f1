"""SIGTERM, Ctrl-C and SLURM's requeue signal, wherever in a step they come."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from benchmarks._subprocess import ROOT
from tests.faults import Fault
from tests.helpers.resumable import differences, read_trace, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RARELY = 100
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_JOB_NAME": "rl",
    "SLURM_NTASKS": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_JOB_NODELIST": "localhost",
}


def run(folder: Path, kind: str, place: str, ranks: int, resume: str = "", **env: str) -> tuple[int, str, float]:
    """Return exit code, what was printed, and seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tests.test_signals", str(folder), kind, place, str(ranks), resume]
    started = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, env=os.environ | env, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr, time.monotonic() - started


def main(folder: str, kind: str, place: str, ranks: str, resume: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell started the tests with &
    moment, phase = place.split() if place else ("", "")
    # On the last rank, where Lightning's launcher, which is rank 0, is not told first.
    last = int(ranks) - 1 if kind == "terminate" else 0
    fault = Fault("hang" if kind == "late" else kind, phase, moment, 3, last) if place else None
    args: dict[str, Any] = {"grace_period": 3.0} if kind == "late" else {}
    if kind == "late":
        hang_after_sigterm()
    train(folder, fault, "colocated_hf", int(ranks), resume or None, save_every=RARELY, **args)


def hang_after_sigterm() -> None:
    from tests import faults

    def strike(kind: str) -> None:
        os.kill(os.getpid(), faults.SIGNALS["terminate"])
        time.sleep(600)

    faults.strike = strike


def unbroken(folder: Path, ranks: int) -> Path:
    code, said, _ = run(folder, "none", "", ranks)
    assert code == 0, said
    return folder


def assert_equal(right: Path, folder: Path, ranks: int) -> None:
    for r in range(ranks):
        assert not differences(torch.load(right / f"end.{r}"), torch.load(folder / f"end.{r}"))
        assert read_trace(right, r) == read_trace(folder, r)


def nobody_is_left(folder: Path) -> bool:
    for _ in range(50):
        if not [p for p in psutil.process_iter(["cmdline"]) if str(folder) in (p.info["cmdline"] or [])]:
            return True
        time.sleep(0.1)
    return False


def test_sigterm_on_one_rank_saves_the_step_on_both_and_ends(tmp_path: Path) -> None:
    right = unbroken(tmp_path / "right", 2)
    code, said, _ = run(tmp_path / "run", "terminate", "during generate", 2)
    assert code == 143, said
    assert "SIGTERM: the run ends after step 4, which is saved in" in said
    assert nobody_is_left(tmp_path / "run")
    code, said, _ = run(tmp_path / "run", "none", "", 2, "last")
    assert code == 0, said
    assert_equal(right, tmp_path / "run", 2)


def test_a_step_that_outlasts_the_grace_period_is_given_up(tmp_path: Path) -> None:
    code, said, _ = run(tmp_path, "late", "during reward", 1)
    assert code == 1
    assert "did not come to the end of its step within grace_period=3 s of SIGTERM" in said


def test_control_c_on_one_rank_ends_both(tmp_path: Path) -> None:
    code, said, _ = run(tmp_path, "interrupt", "during generate", 2)
    assert code not in (0, None)
    assert "KeyboardInterrupt" in said
    assert nobody_is_left(tmp_path)


def test_slurm_requeues_after_the_step_and_the_next_job_goes_on(tmp_path: Path) -> None:
    right = unbroken(tmp_path / "right", 1)
    tools, folder = tmp_path / "tools", tmp_path / "run"
    tools.mkdir()
    (tools / "scontrol").write_text(f'#!/bin/sh\necho "$@" > {tools}/asked\nkill -TERM $PPID\n')
    (tools / "scontrol").chmod(0o755)
    env = SLURM | {"PATH": f"{tools}:{os.environ['PATH']}"}
    code, said, _ = run(folder, "requeue", "during generate", 1, **env)
    assert code == 143, said
    assert (tools / "asked").read_text() == "requeue 77\n"
    assert (folder / "hpc_ckpt_1.ckpt").exists()
    code, said, _ = run(folder, "none", "", 1, "last", **env)
    assert code == 0, said
    assert_equal(right, folder, 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
