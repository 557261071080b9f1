"""Engines of their own beside training: staleness, weights in flight, losses of engines and trainers, clean ends."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from lightrl import RLModule
from lightrl.corrections import TruncatedToken
from lightrl.engines import secure
from lightrl.pools.pool import EngineDiedError
from lightrl.strategies import AsyncVLLMStrategy, ColocatedVLLMStrategy
from tests.helpers.ahead import AtStep, Record, processes_of
from tests.helpers.draws import draw, first_difference, is_near_tie, seed_of
from tests.helpers.fits import BAR, quiet_trainer, tiny_data, whole_weights
from tests.helpers.tiny import tiny_model, tiny_prompts

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

DETECTED, ENDED = 5.0, 10.0
"""Seconds in which a lost engine is noticed, and in which engines end after their trainer."""


def fit(strategy: Any, callbacks: Any, *, data: Any = None, lr: float = 0.02, **args: Any) -> tuple[RLModule, Any]:
    module = RLModule(tiny_model(), lr=lr, correction=TruncatedToken())
    trainer = quiet_trainer(strategy, callbacks=callbacks, **args)
    trainer.fit(module, data or tiny_data(tiny_prompts(16)))
    return module, trainer


# -- synchronous ------------------------------------------------------------------------------------------------------


def test_b40_staleness_0_with_seeds_is_the_colocated_run() -> None:
    records = colocated, ahead = Record(), Record()
    for strategy, record in zip((ColocatedVLLMStrategy(), AsyncVLLMStrategy(max_staleness=0)), records, strict=True):
        data = tiny_data(tiny_prompts(16), deterministic=True)
        fit(strategy, [record], data=data, lr=1e-3, max_steps=20, max_epochs=5)
    for ours, theirs in zip(ahead.rollouts[:10], colocated.rollouts[:10], strict=True):
        assert [r.token_ids.tolist() for r in ours] == [r.token_ids.tolist() for r in theirs]
    assert ahead.losses[:10] == pytest.approx(colocated.losses[:10], abs=1e-5)
    assert len(ahead.losses) == 20
    assert set(ahead.ages) == {0}
    assert max(ahead.gaps()) < BAR
    check_near_ties(ahead)
    if later := first_difference(ahead.rollouts, colocated.rollouts):
        step, i, position = later
        rollout, other = ahead.rollouts[step][i], colocated.rollouts[step][i].completion_ids[position]
        seed = seed_of(0, step, rollout.group_id, i % 3)
        assert is_near_tie(ahead.policies[step], rollout, position, seed, other), later


def check_near_ties(record: Record) -> None:
    """That the draws which would be called near ties are vLLM's own, and that hardly any is one."""
    policy, drawn, ties = record.policies[0], [], []
    for i, r in enumerate(record.rollouts[0]):
        seed = seed_of(0, 0, r.group_id, i % 3)
        for j, token in enumerate(r.completion_ids):
            drawn.append(draw(policy, r, j, seed))
            second = draw(policy, r, j, seed, {token: 50.0})
            assert is_near_tie(policy, r, j, seed, second, tie=50.0)
            ties.append(is_near_tie(policy, r, j, seed, second))
    assert drawn == [token for r in record.rollouts[0] for token in r.completion_ids]
    assert sum(ties) < 0.1 * len(ties)


# -- ahead of training ------------------------------------------------------------------------------------------------


def test_rollouts_ahead_through_a_kill_of_the_engine() -> None:
    """Each token is of the policy that it says, also where a push met its request, and the engine is lost."""
    record, times = Record(step_seconds=0.3), {}
    strategy = AsyncVLLMStrategy(max_staleness=2)

    def kill(trainer: Any) -> None:
        assert strategy._pool is not None
        strategy._pool.listeners.append(lambda: times.setdefault("noticed", time.monotonic()))
        process = processes_of(strategy)[0]
        os.kill(process.pid, signal.SIGKILL)
        times["killed"] = time.monotonic()

    data = tiny_data(tiny_prompts(32), val_prompts=tiny_prompts(3), max_completion_tokens=100)
    options: dict[str, Any] = {"val_check_interval": 4, "check_val_every_n_epoch": None}
    fit(strategy, [record, AtStep(3, kill)], data=data, max_steps=8, **options)
    assert times["noticed"] - times["killed"] < DETECTED
    assert max(record.ages) == 2  # the limit is used, and holds
    assert record.prompts == Counter(dict.fromkeys(record.prompts, 1))
    assert len(record.prompts) == 32
    assert max(record.gaps()) < BAR
    older = {v: record.policies[max(v - 1, 0)] for v in record.policies}
    assert max(record.gaps(older)) > 0.01  # with a policy too old it would have shown
    assert record.validated == 2 * 3


class TwoEngines(Callback):
    """Kills one of two engines, has the other hang when both serve again, and ends training when all is well."""

    def __init__(self) -> None:
        self.steps: dict[str, int] = {}
        self.seconds: dict[str, float] = {}

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.pool = trainer.strategy._pool
        self.processes, self.script = processes_of(trainer.strategy), self._script()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.step = trainer.global_step
        time.sleep(0.2)  # the cores are for the engines that start again
        trainer.should_stop = next(self.script, "over") == "over"

    def _script(self) -> Iterator[None]:
        for index, signal_number in ((0, signal.SIGKILL), (1, signal.SIGSTOP)):
            sent = time.monotonic()
            os.kill(self.processes[index].pid, signal_number)
            for serving, what in ((1, "seen"), (2, "healed")):
                while sum(e.serving for e in self.pool._engines) != serving:
                    assert time.monotonic() < sent + 90
                    yield
                name = f"{signal_number.name} {what}"
                self.steps[name], self.seconds[name] = self.step, time.monotonic() - sent


def test_a_run_goes_on_with_one_of_two_engines() -> None:
    story, record = TwoEngines(), Record()
    data = tiny_data(tiny_prompts(16))
    strategy = AsyncVLLMStrategy(max_staleness=1, num_engines=2)
    _, trainer = fit(strategy, [story, record], data=data, lr=1e-4, max_steps=2000, max_epochs=-1)
    for signal_number in ("SIGKILL", "SIGSTOP"):
        assert story.seconds[f"{signal_number} seen"] < {"SIGKILL": DETECTED, "SIGSTOP": 2 * DETECTED}[signal_number]
        assert story.steps[f"{signal_number} healed"] > story.steps[f"{signal_number} seen"] + 2, "it went on meanwhile"
    assert max(record.ages) <= 1
    assert max(record.gaps()) < BAR
    ahead = 2 * 4
    order = Counter(tuple(p.token_ids) for p in data._train)
    passes = trainer.global_step * 4 / 16
    assert set(record.prompts) == set(order)
    assert all(passes - 1 - ahead / 16 <= n <= passes + 1 + ahead / 16 for n in record.prompts.values())


def test_without_restarts_the_trainer_tells_the_engines_last_words() -> None:
    strategy, started = AsyncVLLMStrategy(max_staleness=1, max_restarts=0), {}

    def kill(trainer: Any) -> None:
        with strategy._pool.launcher._log(0, "ab") as log:  # type: ignore[union-attr]
            log.write(b"out of coffee\n")
        started["pid"], started["killed"] = processes_of(strategy)[0].pid, time.monotonic()
        os.kill(started["pid"], signal.SIGKILL)
        time.sleep(1.0)

    with pytest.raises(EngineDiedError, match=r"engine 0 was lost \(1 times.*SIGKILL(.|\n)*out of coffee"):
        fit(strategy, [AtStep(2, kill)], max_steps=50)
    assert time.monotonic() - started["killed"] < DETECTED + ENDED
    assert strategy._pool is None


def test_an_exception_in_a_callback_leaves_nothing() -> None:
    strategy, seen = AsyncVLLMStrategy(max_staleness=1), {}

    def boom(trainer: Any) -> None:
        seen["processes"] = [psutil.Process(p.pid) for p in processes_of(strategy).values()]
        seen["folder"] = strategy._pool.launcher._folder  # type: ignore[union-attr]
        seen["raised"] = time.monotonic()
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        fit(strategy, [AtStep(1, boom)], max_steps=50)
    assert time.monotonic() - seen["raised"] < ENDED
    assert not any(p.is_running() for p in seen["processes"])
    assert not seen["folder"].exists()


def test_a_resumed_run_trains_on_every_prompt_once(tmp_path: Path) -> None:
    first, second = Record(step_seconds=0.5), Record()
    keep = ModelCheckpoint(tmp_path, filename="at", every_n_train_steps=3, save_top_k=-1)
    data = tiny_data(tiny_prompts(24))
    fit(AsyncVLLMStrategy(max_staleness=2), [first, keep], data=data, max_steps=3, enable_checkpointing=True)
    path = tmp_path / "at.ckpt"
    state = torch.load(path, weights_only=True)
    ahead = state["RolloutDataModule"]["ahead"]
    assert ahead["ready"], "nothing was ready ahead of training"
    module = RLModule(tiny_model(), lr=0.02, correction=TruncatedToken())
    trainer = quiet_trainer(AsyncVLLMStrategy(max_staleness=2), callbacks=[second], max_steps=6)
    trainer.fit(module, tiny_data(tiny_prompts(24)), ckpt_path=path)
    assert first.prompts + second.prompts == Counter(dict.fromkeys(first.prompts + second.prompts, 1))
    assert len(first.prompts + second.prompts) == 24
    assert max(second.ages) <= 2
    # What was ready when the checkpoint was written is trained on as it was.
    ready = {
        tuple(r["prompt_ids"] + r["completion_ids"])
        for e in ahead["ready"]
        for r in (e["group"]["rollouts"] if e["group"] else [])
    }
    assert ready <= {tuple(r.token_ids.tolist()) for rs in second.rollouts for r in rs}


# -- engines that somebody else started -------------------------------------------------------------------------------


@pytest.fixture
def two_servers() -> Iterator[tuple[list[str], list[subprocess.Popen[str]]]]:
    """Two engines as one starts them by hand, on ports of the loopback interface."""
    token = secure.new_token()
    os.environ[secure.TOKEN_VARIABLE] = token
    command = [sys.executable, "-m", "lightrl.engines.server", "--bind", "tcp://127.0.0.1:0"]
    servers: list[subprocess.Popen[str]] = []
    try:
        for _ in range(2):
            server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            servers.append(server)
        addresses = [s.stdout.readline().split()[-1] for s in servers]  # type: ignore[union-attr]
        yield addresses, servers
    finally:
        del os.environ[secure.TOKEN_VARIABLE]
        for server in servers:
            server.kill()
            server.wait()
            server.stdout.close()  # type: ignore[union-attr]


def test_two_engines_started_by_hand_serve_two_runs(two_servers: Any) -> None:
    addresses, servers = two_servers
    for _ in range(2):
        record = Record()
        started = time.monotonic()
        fit(AsyncVLLMStrategy(max_staleness=1, pool=addresses), [record], max_steps=4)
        seconds = time.monotonic() - started
        assert max(record.gaps()) < BAR
        assert max(record.ages) <= 1
        assert all(s.poll() is None for s in servers)
    assert seconds < 10  # the second run finds them standing
    os.environ[secure.TOKEN_VARIABLE] = secure.new_token()
    with pytest.raises(EngineDiedError, match="refused us: its token is another one"):
        fit(AsyncVLLMStrategy(pool=addresses, max_restarts=0), [], max_steps=1)


# -- the trainer's end ------------------------------------------------------------------------------------------------


def endless(folder: str) -> None:
    """Train until someone ends it, telling where its engine is."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell started the tests with &
    strategy = AsyncVLLMStrategy(max_staleness=1)

    def tell(trainer: Any) -> None:
        launcher: Any = strategy._pool.launcher  # type: ignore[union-attr]
        about = {"pid": processes_of(strategy)[0].pid, "folder": str(launcher._folder)}
        Path(folder, "engine.json").write_text(json.dumps(about))

    fit(strategy, [AtStep(2, tell)], max_steps=100_000, max_epochs=-1)


def start_endless(folder: Path) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    command = [sys.executable, "-m", "tests.strategies.test_async_vllm", str(folder)]
    trainer = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    about, deadline = folder / "engine.json", time.monotonic() + 120
    while not about.exists() and trainer.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(0.2)
    assert trainer.poll() is None, trainer.communicate()[0]
    return trainer, json.loads(about.read_text())


def test_ctrl_c_while_the_engine_starts_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.strategies.test_async_vllm", str(tmp_path)]
    env = os.environ | {"TMPDIR": str(tmp_path)}
    trainer = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
    process, deadline = psutil.Process(trainer.pid), time.monotonic() + 120
    while not (children := process.children(recursive=True)) and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1.0)
    assert not list(tmp_path.glob("engine.json")), "it trains already"
    sent = time.monotonic()
    trainer.send_signal(signal.SIGINT)
    said = trainer.communicate(timeout=ENDED + 5)[0]
    assert time.monotonic() - sent < ENDED
    assert trainer.returncode not in (0, -signal.SIGKILL), said
    assert "Traceback" not in said, said
    gone, alive = psutil.wait_procs(children, timeout=1)
    assert gone
    assert not alive
    assert not list(tmp_path.glob("lightrl-pool-*"))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["kill", "ctrl-c"])
def test_engines_end_with_their_trainer(how: signal.Signals, tmp_path: Path) -> None:
    trainer, about = start_endless(tmp_path)
    engine = psutil.Process(about["pid"])
    sent = time.monotonic()
    trainer.send_signal(how)
    trainer.communicate(timeout=ENDED + 5)
    engine.wait(timeout=max(0.1, ENDED - (time.monotonic() - sent)))
    assert trainer.returncode != 0
    deadline = time.monotonic() + 2
    while Path(about["folder"]).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(about["folder"]).exists()


# -- two ranks train --------------------------------------------------------------------------------------------------


def two_ranks(folder: str) -> None:
    from lightrl.distributed import rank

    record = Record()
    module, _ = fit(AsyncVLLMStrategy(max_staleness=1), [record], max_steps=4, devices=2)
    found = (whole_weights(module), record.gaps(), record.ages, record.prompts)
    torch.save(found, Path(folder) / f"{rank()}.pt")


def test_two_ranks_share_one_pool(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.strategies.test_async_vllm", str(tmp_path), "two_ranks"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    (weights, gaps, ages, prompts), other = (torch.load(tmp_path / f"{r}.pt", weights_only=False) for r in (0, 1))
    assert all(torch.equal(w, other[0][name]) for name, w in weights.items())
    assert max(gaps + other[1]) < BAR
    assert max(ages + other[2]) <= 1
    assert prompts + other[3] == Counter(dict.fromkeys(prompts + other[3], 1))
    assert len(prompts + other[3]) == 16


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"max_staleness": -1}, "max_staleness=-1 must be 0 or more"),
        ({"max_staleness": 1, "sync_every": 3}, "sync_every=3 leaves weights 2 steps old"),
        ({"num_engines": 0}, "num_engines=0 must be at least 1"),
        ({"max_staleness": 0.5}, "max_staleness=0.5 must be a whole number"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0 must be at least 1"),
        ({"pool": "slurm"}, "pool='slurm' is neither"),
        ({"oversample": 0.5}, "oversample=0.5 must be 1 or more"),
    ],
)
def test_b40_bad_arguments(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AsyncVLLMStrategy(**args)


@pytest.mark.parametrize("args", [{}, {"rollout_timeout": 9000.0}, {"num_engines": 8, "push_timeout": 1000.0}])
def test_phases_and_collectives_end_after_what_rank_0_waits_for(args: dict[str, Any]) -> None:
    strategy = AsyncVLLMStrategy(**args)
    limits = strategy.phases.limits
    assert limits["push"] > strategy.start_timeout + strategy.push_timeout + 60
    assert limits["setup"] > strategy.start_timeout * (1 + strategy.max_restarts) + 60
    assert limits["generate"] > strategy.rollout_timeout + 60
    assert strategy._timeout.total_seconds() > max(limits.values())
    assert AsyncVLLMStrategy(timeout={"push": 20}).phases.limits["push"] == 20


@pytest.mark.parametrize(
    ("addresses", "message"),
    [
        ([], "has no engine"),
        (["http://x"], "is no engine address"),
        (["tcp://10.0.0.1:5555"], "LIGHTRL_TOKEN is not set"),
    ],
)
def test_bad_addresses(addresses: list[str], message: str) -> None:
    from lightrl.pools.launchers import FixedLauncher

    with pytest.raises(ValueError, match=message):
        FixedLauncher(addresses)


if __name__ == "__main__":
    {"endless": endless, "two_ranks": two_ranks}[sys.argv[2] if len(sys.argv) > 2 else "endless"](sys.argv[1])
