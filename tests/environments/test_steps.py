"""Steps beside the engine: at once, in the order in which they end, and each within its time."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from lightrl.environments.steps import StepRunner
from lightrl.rewards.pool import Outcome, RewardTimeoutError


@pytest.fixture
def runner() -> Any:
    runner = StepRunner(timeout=0.8, at_once=64)
    yield runner
    runner.close()


def collected(runner: StepRunner, calls: list[Any]) -> list[tuple[int, Outcome]]:
    for key, call in enumerate(calls):
        runner.submit(key, call)
    ended = []
    while runner.pending:
        ended += runner.collect(None)
    return ended


def awaited(runner: StepRunner, calls: list[Any]) -> list[tuple[int, Outcome]]:
    ended = []

    async def one(key: int, call: Any) -> None:
        ended.append((key, await runner.run(call)))

    async def every() -> None:
        await asyncio.gather(*(one(key, call) for key, call in enumerate(calls)))

    asyncio.run(every())
    return ended


both = pytest.mark.parametrize("all_of", [collected, awaited])


def after(seconds: float, value: Any) -> Callable[[], Any]:
    def plain() -> Any:
        time.sleep(seconds)
        return value

    return plain


def after_async(seconds: float, value: Any) -> Callable[[], Any]:
    async def coroutine() -> Any:
        await asyncio.sleep(seconds)
        return value

    return coroutine


@both
@pytest.mark.parametrize("kind", [after, after_async])
def test_steps_run_at_once_and_come_back_as_they_end(runner: StepRunner, kind: Any, all_of: Any) -> None:
    started = time.perf_counter()
    ended = all_of(runner, [kind(seconds, key * 10) for key, seconds in enumerate([0.6, 0.05, *[0.1] * 30])])
    assert time.perf_counter() - started < 2.0, "one after the other would take 3.7 s"
    assert {key: outcome.value for key, outcome in ended} == {i: i * 10 for i in range(32)}
    assert ended[-1][0] == 0


@both
def test_no_more_than_allowed_run_at_once_and_waiting_ones_keep_their_time(all_of: Any) -> None:
    runner = StepRunner(timeout=0.4, at_once=2)
    running, most = set(), []

    def step(key: int) -> int:
        running.add(key)
        most.append(len(running))
        time.sleep(0.15)
        running.discard(key)
        return key

    ended = all_of(runner, [partial(step, key) for key in range(8)])
    assert sorted(outcome.value for _, outcome in ended) == list(range(8)), "4 rounds last longer than 0.4 s"
    assert max(most) == 2
    runner.close()


def spin() -> None:
    while True:
        pass


@both
@pytest.mark.parametrize("bad", [spin, after(60, 1), after_async(60, 1)], ids=["spin", "sleep", "async"])
def test_b24_an_overdue_step_is_given_up_and_the_others_go_on(runner: StepRunner, bad: Any, all_of: Any) -> None:
    started = time.perf_counter()
    ended = dict(all_of(runner, [bad if key % 2 else after(0.01, key) for key in range(10)]))
    assert time.perf_counter() - started < 5
    assert [ended[key].value for key in range(0, 10, 2)] == [0, 2, 4, 6, 8]
    assert all(isinstance(ended[key].error, RewardTimeoutError) for key in range(1, 10, 2))


@both
def test_a_coroutine_that_blocks_the_loop_does_not_block_later_ones(runner: StepRunner, all_of: Any) -> None:
    async def blocks() -> None:
        spin()

    assert isinstance(all_of(runner, [blocks])[0][1].error, RewardTimeoutError)
    assert all_of(runner, [after_async(0.01, "fine")])[0][1].value == "fine"


def test_collect_waits_no_longer_than_it_is_told(runner: StepRunner) -> None:
    runner.submit(0, after(0.3, "late"))
    started = time.perf_counter()
    assert runner.collect(0.0) == []
    assert runner.collect(0.05) == []
    assert time.perf_counter() - started < 0.25
    assert [outcome.value for _, outcome in runner.collect(None)] == ["late"]
    assert runner.collect(None) == []


@pytest.mark.parametrize("kind", [after, after_async])
def test_a_step_that_nobody_waits_for_any_more_leaves_its_place(kind: Any) -> None:
    runner = StepRunner(timeout=60, at_once=1)

    async def cancelled_then_another() -> Outcome:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(runner.run(kind(60, "late")), 0.05)
        assert not runner.pending
        return await runner.run(kind(0, "next"))

    assert asyncio.run(cancelled_then_another()).value == "next"
    runner.close()
