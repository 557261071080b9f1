"""Rollouts ahead of training: begun as fast as staleness allows, scored on another thread, handed out in batches."""

from __future__ import annotations

import asyncio
import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from lightrl.engines.messages import Output, Request
from lightrl.engines.session import Request as Turn
from lightrl.partial import Parts, completion
from lightrl.pools.member import Home
from lightrl.prompts import CurriculumOrder
from lightrl.queue import RolloutQueue, Ticket
from lightrl.rng import derive_seed
from lightrl.rollout_state import group_from_state, group_to_state
from lightrl.types import Completion, Prompt, RolloutGroup, Sampling

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lightrl.environments.ahead import EpisodesAhead
    from lightrl.pools.pool import EnginePool
    from lightrl.prompts import MixedOrder, PromptOrder


@dataclass(slots=True)
class Produced:
    """What a training step gets."""

    groups: list[RolloutGroup]
    refused: list[RolloutGroup] = field(default_factory=list)
    """Scored groups that were not worth training on and were replaced."""
    waited: float = 0.0
    """Seconds that training waited for it."""


@dataclass(slots=True)
class Work:
    """What to sample and how to score it."""

    prompts: list[Prompt]
    order: PromptOrder | MixedOrder
    sampling: Sampling
    seed: int
    deterministic: bool
    """A seed for each completion."""
    score: Callable[[list[Prompt], list[list[Any]]], list[RolloutGroup]]
    """Called on a thread of its own, one call at a time, with each prompt's completions or episodes."""
    episodes: EpisodesAhead | None = None
    """What plays the episodes of a prompt; None: a rollout is one completion."""
    keep: Callable[[RolloutGroup], bool] = lambda group: True
    """Whether a scored group is worth training on; otherwise another prompt takes its place."""
    most_refused: int = 0
    """Groups of a batch that may be replaced; after that, places stay empty."""


class RolloutProducer:
    """Keeps engines at work and the queue filled. Made, used and stopped on the trainer's thread.

    Args:
        pool: of engines.
        queue: paces it.
        work: what to do.
        timeout: seconds that training waits for a batch.
    """

    def __init__(
        self, pool: EnginePool, queue: RolloutQueue[RolloutGroup], work: Work, timeout: float = 1800.0
    ) -> None:
        self.pool, self.queue, self.work, self.timeout = pool, queue, work, timeout
        self.rows: dict[int, int] = {}
        """Row of the prompt of each ticket that is not trained on yet, by number."""
        self.parts = Parts()
        """What there is of groups that are not scored yet."""
        self._refused: list[RolloutGroup] = []
        self._serial = itertools.count()
        self._groups: dict[int, asyncio.Task[None]] = {}
        self._unscored: asyncio.Queue[tuple[Ticket[RolloutGroup], list[Any]]] = asyncio.Queue()
        self._scorer = ThreadPoolExecutor(1, thread_name_prefix="lightrl-score")
        self._event = asyncio.Event()
        self._loops: list[asyncio.Task[None]] = []
        self._stopped = False

    def restore(self, state: dict[str, Any]) -> None:
        """Before the start: take over what ``state`` holds: ready groups, parts of others, and prompts to begin."""
        self.queue.next_number = state["next_number"]
        self.rows |= {int(number): int(row) for number, row in state["rows"]}
        for entry in state["ready"]:
            group = None if entry["group"] is None else group_from_state(entry["group"])
            self.queue.tickets[entry["number"]] = Ticket(entry["number"], entry["version"], group, ready=True)
        self.queue.begun = len(self.queue.tickets)
        self.queue.again = sorted(number for number in self.rows if number not in self.queue.tickets)
        self.parts.restore(state.get("parts", []))

    def start(self) -> None:
        """Begin to fill the queue."""
        self._call(self._start(), "the producer's start")

    def next_batch(self) -> Produced:
        """Return the next batch, waiting for it if need be.

        Raises:
            TimeoutError: it did not come in time.
            Exception: what a reward raised, or what became of an engine.
        """
        try:
            produced: Produced = self._call(self._take(), "a batch of rollouts")
        except TimeoutError as error:
            missing = [self.rows.get(n) for n, t in sorted(self.queue.tickets.items()) if not t.ready]
            raise TimeoutError(f"{error}; unfinished are prompts {missing}") from error
        return produced

    def state_dict(self) -> dict[str, Any]:
        """Return every prompt that is begun and not trained on, with what came of it: plain builtins and tensors."""
        if self._stopped:
            return self._snapshot()  # there is no loop any more, and nothing changes
        return self.pool.run(self._state(), self.timeout)  # also after an engine ended for good

    def stop(self) -> None:
        """End all work; what is unfinished has to be sampled again by whoever goes on from :meth:`state_dict`."""
        try:
            self.pool.run(self._stop())
        finally:
            self._stopped = True
            if self.work.episodes is not None:
                self.work.episodes.close()
            self._scorer.shutdown(wait=False, cancel_futures=True)

    def _call(self, work: Any, what: str) -> Any:
        return self.pool.call(work, timeout=self.timeout, what=what)

    # -- on the pool's loop -------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        self.pool.listeners.append(self._event.set)
        self._loops = [asyncio.create_task(self._guarded(loop())) for loop in (self._begin_all, self._score_all)]

    async def _guarded(self, work: Any) -> None:
        try:
            await work
        except Exception as error:
            self.pool.fail(error)

    async def _begin_all(self) -> None:
        while True:
            if self.pool.version >= 0 and self.queue.may_begin(self.pool.version):
                self._begin()
            else:
                await self._wait()

    async def _wait(self) -> None:
        self._event.clear()
        await self._event.wait()

    def _begin(self) -> None:
        ticket = self.queue.begin(self.pool.version)
        if ticket.number not in self.rows:
            self.rows[ticket.number] = self.work.order.take(1)[0]
        oldest = self.parts.oldest(ticket.number)
        if oldest is not None and self.queue.deadline(oldest) < self.queue.batches:
            self.parts.forget(ticket.number)  # too old for every batch to come
        elif oldest is not None:
            ticket.version = min(ticket.version, oldest)
        task = asyncio.create_task(self._guarded(self._sample(ticket)))
        self._groups[ticket.number] = task
        task.add_done_callback(lambda _: self._ended(ticket.number, task))

    def _ended(self, number: int, task: asyncio.Task[None]) -> None:
        if self._groups.get(number) is task:  # else its prompt was begun again, and the entry is that of the new task
            del self._groups[number]

    async def _sample(self, ticket: Ticket[RolloutGroup]) -> None:
        number = ticket.number
        prompt, seeds, home = self.work.prompts[self.rows[number]], self._seeds(number), Home()

        async def ask(turn: Turn) -> Completion:
            (sampled,) = await self._complete(number, [turn], home)
            return sampled

        if self.work.episodes is not None:
            sampled: list[Any] = await self.work.episodes.play(prompt, seeds, ask)
        else:
            longest = self.work.sampling.max_completion_tokens
            whole = [Turn(i, prompt.token_ids, longest, seed) for i, seed in enumerate(seeds)]
            await self._complete(number, self.parts.rest(number, whole), home, self._note)
            sampled = [self.parts.of(number)[turn.key].completion for turn in whole]
        await self._unscored.put((ticket, sampled))

    def _note(self, output: Output) -> None:
        self.parts.add(output, ended=True)

    def _seeds(self, number: int) -> list[int]:
        batch, place = divmod(number, self.queue.prompts_per_step)
        seed = derive_seed(derive_seed(self.work.seed, "train", batch), place)  # as the colocated strategies have it
        return [derive_seed(seed, i) for i in range(self.work.sampling.num_completions)]

    async def _complete(
        self, number: int, turns: list[Turn], home: Home, note: Callable[[Output], None] | None = None
    ) -> list[Completion]:
        wanted = [
            request(
                f"{number}.{turn.key}.{next(self._serial)}",
                turn.prompt_ids,
                replace(self.work.sampling, max_completion_tokens=turn.max_tokens),
                turn.seed if self.work.deterministic else None,
            )
            for turn in turns
        ]
        return [completion(output) for output in await self.pool.generate(wanted, home, note)]

    async def _score_all(self) -> None:
        while True:
            done = [await self._unscored.get()]
            while not self._unscored.empty():
                done.append(self._unscored.get_nowait())
            # One that was given back in the meantime has another ticket, or none.
            done = [(t, s) for t, s in done if self.queue.tickets.get(t.number) is t]
            prompts = [self.work.prompts[self.rows[t.number]] for t, _ in done]
            score = asyncio.get_running_loop().run_in_executor
            groups = await score(self._scorer, self.work.score, prompts, [s for _, s in done])
            for (ticket, _), group in zip(done, groups, strict=True):
                if self.queue.tickets.get(ticket.number) is ticket:
                    self._finish(ticket, group)
            self._event.set()

    def _finish(self, ticket: Ticket[RolloutGroup], group: RolloutGroup) -> None:
        if isinstance(self.work.order, CurriculumOrder) and group.mean_reward is not None:
            self.work.order.note({self.rows[ticket.number]: group.mean_reward})
        self.parts.forget(ticket.number)
        if self.work.keep(group):
            self.queue.finish(ticket, group)
            return
        self._refused.append(group)
        if len(self._refused) > self.work.most_refused:
            self.queue.finish(ticket, None)
        else:
            self.queue.give_back(ticket, again=False)
            del self.rows[ticket.number]

    async def _take(self) -> Produced:
        started = asyncio.get_running_loop().time()
        while (groups := self.queue.take()) is None:
            await self._wait()
        for ticket in self.queue.overdue():
            self.queue.give_back(ticket, again=True)
            self.parts.forget(ticket.number)
            if ticket.number in self._groups:
                self._groups[ticket.number].cancel()
        outstanding = {*self.queue.tickets, *self.queue.again}
        self.rows = {number: row for number, row in self.rows.items() if number in outstanding}
        refused, self._refused = self._refused, []
        self._event.set()
        return Produced(groups, refused, asyncio.get_running_loop().time() - started)

    async def _state(self) -> dict[str, Any]:
        return self._snapshot(await self.pool.running() if self.work.episodes is None else [])

    def _snapshot(self, running: Sequence[Output] = ()) -> dict[str, Any]:
        unscored = {t.number for t in self.queue.tickets.values() if not t.ready} | set(self.queue.again)
        return {
            "parts": self.parts.state(unscored, running),
            "order": self.work.order.state_dict(),
            "next_number": self.queue.next_number,
            "rows": sorted(self.rows.items()),
            "ready": [_ready_state(t) for t in self.queue.tickets.values() if t.ready],
        }

    async def _stop(self) -> None:
        for task in (*self._loops, *self._groups.values()):
            task.cancel()
        await asyncio.gather(*self._loops, *self._groups.values(), return_exceptions=True)


def _ready_state(ticket: Ticket[RolloutGroup]) -> dict[str, Any]:
    group = None if ticket.group is None else group_to_state(ticket.group)
    return {"number": ticket.number, "version": ticket.version, "group": group}


def request(request_id: str, ids: list[int], sampling: Sampling, seed: int | None) -> Request:
    """Return the request for one completion."""
    return Request(
        id=request_id,
        prompt=ids,
        max_tokens=sampling.max_completion_tokens,
        temperature=sampling.temperature,
        stop_token_ids=list(sampling.stop_token_ids),
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=seed,
    )
