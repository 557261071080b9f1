"""What the GPU benchmarks ``step`` and ``scaling`` run, on a CPU and tiny."""

import pytest

from benchmarks import scaling
from benchmarks._steps import MEMBERS, STEPS, WARM, SetUp, fit, medians


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
