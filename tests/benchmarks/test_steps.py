"""What GPU benchmarks of whole steps run, on a CPU and tiny; their verdicts."""

import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import _trl, async_gpus, scaling, step, swaps_gpu
from benchmarks._steps import MEMBERS, STEPS, WARM, SetUp, fit, medians, steps_of


@pytest.mark.vllm
def test_a_set_up_is_trained_and_timed() -> None:
    setup = SetUp(shape="tiny", tail=True)
    steps = fit(setup)
    assert len(steps) == WARM + STEPS
    found = medians(steps)
    assert set(scaling.COLUMNS) <= set(found)
    assert MEMBERS * setup.prompts <= found["tokens"] < MEMBERS * setup.prompts * setup.completion
    assert scaling.rate(setup, found) == pytest.approx(found["tokens"] / found["step"])
    assert "tiny, 1 in turns, TP 1, long tail" in scaling.row(setup, found)


def test_every_split_and_tensor_parallel_size_that_fits_is_measured() -> None:
    found = scaling.colocated(4, "0.6B")
    assert [(s.devices, s.tensor_parallel_size) for s in found] == [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)]
    assert [(s.devices, s.num_engines, s.gpus) for s in scaling.asynchronous(4, "0.6B")] == [
        (3, 1, 4),
        (2, 2, 4),
        (1, 3, 4),
    ]
    assert {s.prompts for s in scaling.asynchronous(4, "0.6B")} == {256}


def test_the_plan_is_made_of_the_same_seconds() -> None:
    stages = {"time/generate": 8.0, "time/train_step": 3.0, "time/weight_sync": 0.5, "time/swap": 1.0}
    whole, half = stages | {"tokens": 800.0, "longest": 90.0}, {"time/generate": 6.0, "tokens": 400.0, "longest": 90.0}
    plan = scaling.planned(whole, half, 4)
    assert plan.step.in_turns == 12.5
    assert plan.step.fixed_share == 0.5
    assert len(plan.splits) == 3


def test_generation_beside_training_is_measured_by_equal_work() -> None:
    alone = {"time/generate": 6.0, "time/train_step": 5.0, "step": 12.0, "tokens": 100.0}
    alone["mismatch/logprob_diff_mean"] = 0.01
    assert async_gpus.judge(alone, alone | {"step": 6.6}).ok
    assert not async_gpus.judge(alone, alone | {"step": 6.6, "tokens": 90.0}).ok
    assert not async_gpus.judge(alone | {"mismatch/logprob_diff_mean": 0.03}, alone | {"step": 6.6}).ok


@pytest.mark.vllm
def test_swaps_are_measured_in_a_program_of_its_own() -> None:
    small = {"shape": "tiny", "share": 1.0, "steps": 20}
    result = swaps_gpu.main(limit=250, **small)
    assert result.ok, result.table
    assert result.figure.startswith("20 swaps, mean |dlogp| ")
    assert len(result.table.splitlines()) == 5


def swaps(**last: float) -> list[dict[str, float]]:
    """100 swaps, the last ten of which are as ``last`` says."""
    good = {"mismatch/logprob_diff_mean": 0.01, "kl/mismatch": 1e-4, "device": 70.0, "host": 3.0, "files": 50.0}
    good["step"] = 1.0
    return [good] * 90 + [good | last] * 10


def test_swaps_bars() -> None:
    assert swaps_gpu.judge(swaps()).ok
    assert swaps_gpu.judge(swaps(device=70.05, host=2.9)).ok, "51 MiB"
    gap = {"mismatch/logprob_diff_mean": 0.012}
    for worse in ({"device": 70.08}, {"host": 3.1}, {"files": 51.0}, gap):
        assert not swaps_gpu.judge(swaps(**worse)).ok, worse
    assert not swaps_gpu.judge(swaps()[:99]).ok, "a time limit ended it"
    with pytest.raises(ValueError, match="only 19 swaps were made in time"):
        swaps_gpu.judge(swaps()[:19])


def steps_at(rate: float, count: int = WARM + STEPS) -> list[dict[str, float]]:
    found = {"step": 10.0, "tokens": 10 * rate, "prompt_tokens": 5000.0, "time/generate": 5.0, "time/train_step": 2.0}
    return [{"step": 99.0}] * WARM + [found | {"peak": 30.0, "kl/mismatch": 1e-4}] * (count - WARM)


def test_the_step_is_judged_against_trl_of_the_same_run_or_as_recorded() -> None:
    assert step.judge(steps_at(2701), 1000.0, []).ok
    assert not step.judge(steps_at(2699), 1000.0, []).ok
    recorded = step.judge(steps_at(2.8 * step.RECORDED), None, ["TRL is not installed"])
    assert recorded.ok
    assert recorded.figure.startswith("2.80 x TRL's 9,121 as recorded: 10.0 s a step")
    assert "TRL is not installed" in recorded.table
    found = medians(steps_at(2500))
    assert step.trained(found) == 15_000
    assert [float(x.replace(",", "")) for x in step.row("", found).split()][-5:] == [2500, 5000, 15_000, 30, 0]


def test_trl_that_is_missing_or_fails_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def failed(*_: Any) -> None:
        raise RuntimeError("_trl exited with 1: no such engine")

    monkeypatch.setattr(step.importlib.util, "find_spec", lambda name: None)
    assert step.baseline(1.0, "tiny") == (
        None,
        ["TRL is not installed: 9,121 completion tokens/s, as recorded on one H200"],
    )
    monkeypatch.setattr(step.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(step, "steps_of", failed)
    rate, said = step.baseline(1.0, "tiny")
    assert rate is None
    assert "no such engine" in said[1]


def test_what_a_time_limit_leaves_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    write = "import pathlib, sys, time\npathlib.Path(sys.argv[1], '0.json').write_text('[{}]')\n"
    Path(tmp_path, "stalls.py").write_text(write.format('{"step": 1.0}') + "time.sleep(60)")
    assert steps_of(SetUp(), 2.0, "stalls") == [{"step": 1.0}]
    with pytest.raises(ValueError, match="1 steps were measured, the first 2 of which do not count"):
        medians([{"step": 1.0}])
    Path(tmp_path, "silent.py").write_text("import time\ntime.sleep(60)")
    with pytest.raises(subprocess.TimeoutExpired):
        steps_of(SetUp(), 0.5, "silent")


class Engine:
    def wake(self) -> None:
        time.sleep(0.02)

    def push(self) -> str:
        self.wake()
        time.sleep(0.04)
        return "pushed"


def test_a_stage_inside_another_counts_for_itself_alone() -> None:
    clock, engine = _trl.Clock(), Engine()
    clock.watch(engine, "push", "weight_sync")
    clock.watch(engine, "wake", "swap")
    clock.watch(engine, "push", "never", when=lambda: False)
    since = time.perf_counter()
    assert engine.push() == "pushed"
    elapsed = time.perf_counter() - since
    assert set(clock.seconds) == {"time/weight_sync", "time/swap"}
    assert clock.seconds["time/swap"] >= 0.02
    assert clock.seconds["time/weight_sync"] >= 0.04
    assert sum(clock.seconds.values()) <= elapsed
