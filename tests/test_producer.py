"""Rollouts ahead of training, on a pool of coroutines: failures arrive, nothing is lost or repeated."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lightrl.producer import RolloutProducer, Work
from lightrl.prompts import PromptOrder
from lightrl.queue import RolloutQueue
from tests.helpers.pools import FakePool, number_of, numbers_of, score, work


@contextmanager
def producing(pool: FakePool, work: Work, state: Any = None, timeout: float = 10.0, **queue: Any) -> Iterator[Any]:
    """A producer at work; ended, and its pool with it, whatever happens."""
    paced: RolloutQueue[Any] = RolloutQueue(**{"prompts_per_step": 2} | queue)
    producer = RolloutProducer(pool, paced, work, timeout)
    try:
        if state is not None:
            work.order.load_state_dict(state["order"])
            producer.restore(state)
        producer.start()
        yield producer
    finally:
        started = time.monotonic()
        producer.stop()
        pool.close()
        assert time.monotonic() - started < 3


def train(pool: FakePool, producer: RolloutProducer, steps: int) -> list[int]:
    found: list[int] = []
    for step in range(steps):
        pool.update(step)
        found += numbers_of(producer.next_batch().groups)
    return found


def chain(error: BaseException | None) -> str:
    said = ""
    while error is not None:
        said += f"{error!r}\n"
        error = error.__cause__ or error.__context__
    return said


# -- failures ----------------------------------------------------------------------------------------------------------


def test_b38_a_reward_that_raises_ends_the_wait_for_its_batch() -> None:
    calls = []

    def boom(prompts: Any, completions: Any) -> Any:
        calls.extend(prompts)
        if len(calls) > 4:
            raise RuntimeError("boom")
        return score(prompts, completions)

    pool = FakePool()
    with producing(pool, work(score=boom), timeout=60) as producer:
        started = time.monotonic()
        with pytest.raises(RuntimeError) as raised:
            train(pool, producer, steps=10)
        assert time.monotonic() - started < 5
        assert "boom" in chain(raised.value)
        with pytest.raises(RuntimeError, match="boom"):  # and again, for whoever asks later
            producer.next_batch()


def test_b38_an_engine_that_answers_with_an_error_ends_the_wait() -> None:
    async def sample(request: Any) -> None:
        if number_of(request) == 3:
            raise RuntimeError("boom")

    pool = FakePool(sample)
    with producing(pool, work(), timeout=60) as producer:
        producer.next_batch()
        pool.update(1)
        started = time.monotonic()
        with pytest.raises(RuntimeError, match="boom"):
            producer.next_batch()
        assert time.monotonic() - started < 5


def test_b38_a_trainer_that_stops_early_ends_everything_in_seconds() -> None:
    async def sample(request: Any) -> None:
        await asyncio.sleep(0 if number_of(request) < 2 else 3600)

    before = threading.active_count()
    with producing(FakePool(sample), work(), max_staleness=4) as producer:
        assert numbers_of(producer.next_batch().groups) == [0, 1]
    deadline = time.monotonic() + 3
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert threading.active_count() == before


def test_b38_a_group_that_never_returns_is_named_when_time_is_up() -> None:
    async def sample(request: Any) -> None:
        await asyncio.sleep(3600 if number_of(request) == 1 else 0)

    row = PromptOrder(8, seed=0).take(2)[1]
    with (
        producing(FakePool(sample), work(), timeout=0.5) as producer,
        pytest.raises(TimeoutError, match=rf"a batch of rollouts did not end within 0.5 s.*prompts \[{row}\]"),
    ):
        producer.next_batch()


def test_a_lost_engine_costs_time_and_no_prompt() -> None:
    pool = FakePool(loss=0.3)
    with producing(pool, work(), max_staleness=1) as producer:
        found = train(pool, producer, steps=20)
    assert pool.losses > 5
    assert sorted(found) == list(range(40))


# -- going on ----------------------------------------------------------------------------------------------------------


def test_a_producer_goes_on_from_the_state_of_another_and_nothing_is_lost_or_repeated() -> None:
    async def sample(request: Any) -> None:
        # Of the four that are ahead two are ready when the state is taken, and two are under way.
        await asyncio.sleep(3600 if number_of(request) in (5, 7) else 0)

    pool = FakePool(sample)
    with producing(pool, work(), max_staleness=2) as producer:
        trained = numbers_of(producer.next_batch().groups)
        pool.update(1)
        deadline = time.monotonic() + 5
        while sum(t.ready for t in producer.queue.tickets.values()) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        state = producer.state_dict()
    ready = {entry["number"] for entry in state["ready"]}
    assert ready == {2, 3, 4, 6}
    assert {number for number, _ in state["rows"]} == {2, 3, 4, 5, 6, 7}
    pool = FakePool()
    with producing(pool, work(), state, max_staleness=2, first_step=1) as producer:
        for step in range(1, 8):
            pool.update(step)
            batch = producer.next_batch().groups
            trained += numbers_of(batch)
            assert all(step - int(r.policy_versions.min()) <= 2 for g in batch for r in g.rollouts)
    assert sorted(trained) == list(range(16))
    assert not ready & set(pool.sampled)
    assert {5, 7} <= set(pool.sampled)


def test_prompts_are_sampled_in_the_order_of_the_data() -> None:
    pool = FakePool()
    rows: list[int] = []
    with producing(pool, work()) as producer:
        for step in range(8):
            pool.update(step)
            rows += [g.prompt.index for g in producer.next_batch().groups]
    assert rows == PromptOrder(8, seed=0).take(16)


# -- groups that are not worth training on -----------------------------------------------------------------------------


def test_refused_groups_are_replaced_and_handed_out_for_the_metrics() -> None:
    pool = FakePool()
    with producing(pool, work(keep=lambda g: g.prompt.index % 2 == 0, most_refused=100)) as producer:
        kept, refused = [], []
        for step in range(4):
            pool.update(step)
            produced = producer.next_batch()
            assert len(produced.groups) == 2
            kept += [g.prompt.index for g in produced.groups]
            refused += [g.prompt.index for g in produced.refused]
    assert all(row % 2 == 0 for row in kept)
    assert refused
    assert all(row % 2 == 1 for row in refused)
    order = PromptOrder(8, seed=0).take(64)
    assert sorted(kept + refused) == sorted(order[: len(kept + refused)])


def test_after_most_refused_places_stay_empty() -> None:
    with producing(FakePool(), work(keep=lambda g: False, most_refused=3)) as producer:
        produced = producer.next_batch()
    assert produced.groups == []
    assert len(produced.refused) == 3 + 2  # the replaced ones, and one for each place that stays empty


# -- the benchmark -----------------------------------------------------------------------------------------------------


def test_queue_soak_sees_what_is_lost_repeated_or_mixed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import queue_soak

    monkeypatch.setattr(queue_soak, "RESTART_EVERY", 3)
    seen, state = queue_soak.soak(80)
    assert seen.restarts == 3
    assert queue_soak.faults(seen, state) == []
    assert not queue_soak.judge(seen, []).ok  # too few
    seen.numbers[3], seen.numbers[4] = seen.numbers[4], seen.numbers[3]
    assert queue_soak.faults(seen, state) == ["a prompt is not the one of its place in the order"]
    seen.numbers[3] = seen.numbers[4]
    assert "a prompt was lost or trained on twice" in queue_soak.faults(seen, state)
    seen.most["rows"] = 31
    assert "31 rows, more than 30" in queue_soak.faults(seen, state)


def slow(numbers: set[int]) -> Any:
    """Groups of these numbers never end."""

    async def sample(request: Any) -> None:
        if number_of(request) in numbers:
            await asyncio.Event().wait()

    return sample


def test_the_state_can_be_had_after_the_end() -> None:
    """Lightning users save a checkpoint after ``fit``."""
    pool = FakePool(slow({2, 3}))
    with producing(pool, work(num_prompts=20), max_staleness=1) as producer:
        producer.next_batch()
        before = producer.state_dict()
    assert producer.state_dict() == before
    assert [number for number, _ in before["rows"]] == [2, 3]


def test_a_group_that_was_let_go_twice_is_not_sampled_on() -> None:
    pool = FakePool(slow({2}))
    with producing(pool, work(num_prompts=20), max_staleness=1, oversample=1.5) as producer:
        for step in range(4):
            producer.next_batch()
            pool.update(step + 1)
            time.sleep(0.1)
        assert pool.pending == 2  # both requests of the slow group's last try: the earlier ones were stopped
    assert pool.pending == 0
