"""The producer alone, on a pool without engines whose completions end when the test says so."""

import asyncio
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from lightrl.engines.messages import EngineSpec, Output, Request, float_bytes
from lightrl.pools.pool import EnginePool
from lightrl.producer import RolloutProducer, Work
from lightrl.prompts import PromptOrder
from lightrl.queue import RolloutQueue
from lightrl.types import Completion, Prompt, RolloutGroup, Sampling


class Pool(EnginePool):
    """Answers at once, but for the numbers of groups in ``slow``, which never end."""

    now = 0

    def __init__(self, slow: set[int]) -> None:
        launcher: Any = SimpleNamespace(num_engines=0, owns=False, close=lambda seconds: None)
        super().__init__(launcher, EngineSpec({}, "float32"))
        self.slow, self.running = slow, 0

    @property
    def version(self) -> int:
        return self.now

    async def generate(self, requests: list[Request]) -> list[Output]:
        self.running += 1
        try:
            if int(requests[0].id.split(".")[0]) in self.slow:
                await asyncio.gather(asyncio.Event().wait())
        finally:
            self.running -= 1
        return [Output(r.id, [5], float_bytes([-1.0]), [(self.now, 1)], truncated=False) for r in requests]

    def advance(self) -> None:
        async def notify() -> None:
            self.now += 1
            for listener in self.listeners:
                listener()

        self.run(notify())


def score(prompts: list[Prompt], completions: list[list[Completion]]) -> list[RolloutGroup]:
    return [RolloutGroup(prompt, []) for prompt in prompts]


Start = Callable[..., RolloutProducer]


@pytest.fixture
def start() -> Iterator[Start]:
    pools: list[Pool] = []

    def begin(slow: set[int], **options: Any) -> RolloutProducer:
        prompts = [Prompt([i], index=i) for i in range(20)]
        work = Work(prompts, PromptOrder(20, 0, False), Sampling(4, 2), seed=0, deterministic=False, score=score)
        pools.append(Pool(slow))
        pools[-1].start()
        producer = RolloutProducer(pools[-1], RolloutQueue(2, **options), work, timeout=20.0)
        producer.start()
        return producer

    yield begin
    for pool in pools:
        pool.close()


def test_the_state_can_be_had_after_the_end(start: Start) -> None:
    """Lightning users save a checkpoint after ``fit``."""
    producer = start({2, 3}, max_staleness=1)
    producer.next_batch()
    before = producer.state_dict()
    producer.stop()
    producer.pool.close()
    assert producer.state_dict() == before
    assert [number for number, _ in before["rows"]] == [2, 3]


def test_a_group_that_was_let_go_twice_is_not_sampled_on(start: Start) -> None:
    producer = start({2}, max_staleness=1, oversample=1.5)
    pool: Any = producer.pool
    for _ in range(4):
        producer.next_batch()
        pool.advance()
        time.sleep(0.1)
    assert pool.running == 1  # the last try of the slow group: the earlier ones were stopped
    producer.stop()
    assert pool.running == 0
