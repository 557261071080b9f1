"""A pool whose engines are coroutines: everything above the sockets is real."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from lightrl.engines.messages import EngineSpec, Output, Request, float_bytes
from lightrl.pools.client import EngineLostError
from lightrl.pools.pool import EnginePool
from lightrl.producer import Work
from lightrl.prompts import PromptOrder
from lightrl.types import Completion, Prompt, Rollout, RolloutGroup, Sampling


def number_of(request: Request) -> int:
    """Of the ticket that a request belongs to."""
    return int(request.id.split(".")[0])


class FakePool(EnginePool):
    """Completions are [row of the prompt, number of its ticket], sampled by ``sample``, which may take time or raise.

    ``loss`` is the share of requests that lose their engine.
    """

    def __init__(
        self, sample: Callable[[Request], Awaitable[None]] | None = None, loss: float = 0.0, seed: int = 0
    ) -> None:
        launcher: Any = SimpleNamespace(num_engines=1, owns=True, close=lambda seconds: None)
        super().__init__(launcher, EngineSpec({}, "float32"))
        self.sample, self.loss, self.random = sample, loss, random.Random(seed)
        self.current = 0
        self.sampled: list[int] = []
        self.losses = 0
        self.pending = self.most_pending = 0
        self.start()

    async def _start(self) -> None:
        self._context: Any = SimpleNamespace(term=lambda: None)

    @property
    def version(self) -> int:
        return self.current

    def update(self, version: int) -> None:
        """What a push does."""

        async def update() -> None:
            self.current = version
            for listener in self.listeners:
                listener()

        self.run(update())

    async def _least_loaded(self) -> Any:
        return SimpleNamespace(generate=self._submit, abort=lambda ids: None)

    def _submit(
        self, requests: list[Request], note: Callable[[Output], None] | None = None
    ) -> list[asyncio.Task[Output]]:
        return [asyncio.create_task(self._one(r, note)) for r in requests]

    async def _one(self, request: Request, note: Callable[[Output], None] | None) -> Output:
        started = self.current
        self.pending += 1
        self.most_pending = max(self.most_pending, self.pending)
        try:
            if self.random.random() < self.loss:
                self.losses += 1
                await asyncio.sleep(0)
                raise EngineLostError("its process was killed")
            if self.sample is not None:
                await self.sample(request)
        finally:
            self.pending -= 1
        self.sampled.append(number_of(request))
        ids = [request.prompt[0], number_of(request)]
        output = Output(request.id, ids, float_bytes([-1.0, -2.0]), [(started, 1), (self.current, 1)], truncated=False)
        if note is not None:
            note(output)
        return output


def score(prompts: list[Prompt], completions: list[list[Completion]]) -> list[RolloutGroup]:
    return [
        RolloutGroup(
            p, [Rollout(p.token_ids, c.token_ids, c.logprobs, 1.0, policy_versions=c.policy_versions) for c in group]
        )
        for p, group in zip(prompts, completions, strict=True)
    ]


def work(num_prompts: int = 8, group_size: int = 2, **args: Any) -> Work:
    prompts = [Prompt([row], index=row) for row in range(num_prompts)]
    sampling = Sampling(max_completion_tokens=4, num_completions=group_size)
    return Work(prompts, PromptOrder(num_prompts, seed=0), sampling, 0, False, **{"score": score} | args)


def numbers_of(groups: list[RolloutGroup]) -> list[int]:
    """The number of each group's ticket; every member must have come from it, and from its prompt."""
    numbers = []
    for group in groups:
        (number,) = {r.completion_ids[1] for r in group.rollouts}
        assert {r.completion_ids[0] for r in group.rollouts} == {group.prompt.index}
        numbers.append(number)
    return numbers
