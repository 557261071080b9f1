"""The engines of a run: kept alive, given the current weights before they serve, and asked in turn."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import zmq.asyncio
from torch import Tensor

from lightrl.engines.messages import EngineSpec, Output, Request, Task
from lightrl.engines.staging import Shipment
from lightrl.pools.client import EngineClient, EngineLostError
from lightrl.pools.launchers import Launcher
from lightrl.pools.loop import END_SECONDS, LoopThread
from lightrl.pools.member import Home, Member
from lightrl.rng import derive_seed

_POLL_SECONDS = 0.25
_ENDING_POLLS = 4
_PING_SECONDS = 5.0

log = logging.getLogger(__name__)
T = TypeVar("T")


class EngineDiedError(RuntimeError):
    """An engine was lost more often than it may be restarted."""


class EnginePool(LoopThread):
    """Minds engine processes on an event loop of its own; every public method is called from another thread.

    Args:
        launcher: starts them.
        spec: what each is.
        seed: of what engines sample without a seed of its own.
        max_restarts: how often each engine may be lost within an hour before the run ends; 0: never.
        start_timeout: seconds that an engine may take to stand.
        push_timeout: seconds that an engine may take to load weights before it counts as lost.
        answer_timeout: seconds that a serving engine may take to say that it is there before it counts as lost.
    """

    def __init__(
        self,
        launcher: Launcher,
        spec: EngineSpec,
        *,
        seed: int = 0,
        max_restarts: int = 3,
        start_timeout: float = 600.0,
        push_timeout: float = 300.0,
        answer_timeout: float = 60.0,
    ) -> None:
        super().__init__("lightrl-pool")
        self.launcher, self.spec, self.seed = launcher, spec, seed
        self.max_restarts, self.start_timeout, self.push_timeout = max_restarts, start_timeout, push_timeout
        self.answer_timeout = answer_timeout
        self.pauses: list[float] = []
        """Seconds that each engine stood still for the last push."""
        self.listeners: list[Callable[[], None]] = []
        """Called on the loop whenever an engine begins or ceases to serve, or has new weights."""
        self._engines: list[Member] = []
        self._supervisors: list[asyncio.Task[None]] = []
        self._latest: Shipment | None = None
        self._pushes = 0
        self._held: list[asyncio.Lock] = []

    # -- from the trainer's thread ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all engines; return when they stand.

        Raises:
            EngineDiedError: one does not.
        """
        self.begin()
        self.call(self._start(), timeout=self.start_timeout * (1 + self.max_restarts) + 10, what="the engines' start")

    def hold(self) -> None:
        """Wait until no engine reads the last shipment, and let none begin to: its memory may be written to.

        The next push ends this. Engines that are told so have nothing under way when it comes.
        """
        self.call(self._hold(), timeout=self.push_timeout, what="an engine that reads weights")

    def push(self, shipment: Shipment) -> None:
        """Give weights to every engine at once; return when all that serve hold them."""
        # The start too: where the only engine is being started again, the push waits for it.
        self.call(self.ship(shipment), timeout=self.start_timeout + self.push_timeout, what="a push of weights")

    def close(self) -> None:
        """End engines, loop and thread; may be called twice."""
        try:
            if self.is_running:
                self.run(self._stop())
        finally:
            self.end()
            self.launcher.close(END_SECONDS)

    # -- on the loop --------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The oldest weights that any serving engine holds; those last pushed where none serves."""
        versions = [e.version for e in self._engines if e.serving]
        return min(versions) if versions else self._latest.push.version if self._latest else -1

    async def generate(
        self, requests: list[Request], home: Home | None = None, note: Callable[[Output], None] | None = None
    ) -> list[Output]:
        """Sample the members of a group on one engine, ``home`` if it serves; again elsewhere if it is lost.

        ``note`` is called with each output as it comes.
        """
        found: dict[str, Output] = {}
        home = home or Home()
        while missing := [r for r in requests if r.id not in found]:
            if not any(e.serving and e.client is home.client for e in self._engines):
                home.client = await self._least_loaded()
            client = home.client
            assert client is not None
            futures = client.generate(missing, note)
            try:
                results = await asyncio.gather(*futures, return_exceptions=True)
            except asyncio.CancelledError:
                client.abort([r.id for r in missing])
                raise
            for request, result in zip(missing, results, strict=True):
                if isinstance(result, Output):
                    found[request.id] = result
                elif not isinstance(result, EngineLostError):
                    raise result
        return [found[r.id] for r in requests]

    async def running(self) -> list[Output]:
        """Return what has been sampled so far of requests that have not ended; nothing of an engine that is lost."""
        return [output for engine in self._engines for output in await engine.running()]

    async def score(self, sequences: list[list[int]]) -> list[list[Tensor]]:
        """Return what every serving engine, at least one, makes of the sequences (see :meth:`EngineClient.score`)."""
        scores: list[list[Tensor]] = []
        while not scores:
            await self._least_loaded()
            for engine in self._engines:
                if engine.serving and engine.client is not None:
                    with suppress(EngineLostError):  # its supervisor sees to it
                        scores.append(await engine.client.score(sequences))
            await asyncio.sleep(0)  # or the supervisor would never get to see it
        return scores

    async def task(self) -> list[Task]:
        """Return the prompts that the first engine, a rollout server, has, in pages; the pool has to stand."""
        return await self._engines[0].client.task()  # type: ignore[union-attr]

    async def _hold(self) -> None:
        for lock in [e.shipping for e in self._engines if e.shipping not in self._held]:
            await lock.acquire()
            self._held.append(lock)
        for engine in self._engines:
            engine.hold()

    async def ship(self, shipment: Shipment) -> None:
        """See :meth:`push`."""
        self._latest = shipment
        self._pushes += 1  # not the version: weights may change between two optimizer steps
        number = self._pushes
        self.pauses = []
        while self._held:
            self._held.pop().release()
        behind = [e for e in self._engines if e.serving and e.pushed < number]
        await asyncio.gather(*map(self._update, behind))
        await self.until(lambda: any(e.serving and e.pushed >= number for e in self._engines))

    async def _start(self) -> None:
        self._context = zmq.asyncio.Context()
        self._engines = [Member(i) for i in range(self.launcher.num_engines)]
        self._supervisors = [asyncio.create_task(self._supervise(e)) for e in self._engines]
        await self.until(lambda: all(e.serving for e in self._engines))

    async def _supervise(self, engine: Member) -> None:
        try:
            while True:
                reason = await self._serve(engine)
                await self._set(engine, serving=False)
                if engine.client is not None:
                    engine.client.close()
                words = self.launcher.last_words(engine.index)
                losses = engine.note_loss()
                if losses > self.max_restarts:
                    often = f"{losses} times within an hour, more than max_restarts={self.max_restarts}"
                    told = f"\nThe last it printed:\n{words}" if words else ""
                    self.fail(EngineDiedError(f"engine {engine.index} was lost ({often}): {reason}{told}"))
                    return
                log.warning("engine %d was lost (%s); starting it again", engine.index, reason)
        except Exception as error:
            self.fail(error)

    async def _serve(self, engine: Member) -> str:
        """Start an engine, hand it the weights and let it serve; return why it ended."""
        address = await self.launcher.start(engine.index)
        client = engine.client = EngineClient(self._context, address, self.launcher.token)
        engine.version, engine.pushed = -1, 0
        starting = asyncio.create_task(self._bring_up(engine, client))
        minding = asyncio.create_task(self._mind(engine, client))
        deadline = self.loop.time() + self.start_timeout
        try:
            while not client.lost.done():
                if starting.done() and starting.exception() is not None:
                    error = starting.exception()
                    if not isinstance(error, EngineLostError):
                        raise error  # type: ignore[misc]
                    return str(error)
                if not starting.done() and self.loop.time() > deadline:
                    return f"it did not stand within start_timeout={self.start_timeout:.0f} s"
                if ended := self.launcher.ended(engine.index):
                    return ended
                await asyncio.wait({client.lost}, timeout=_POLL_SECONDS)
            reason = client.lost.result()
            await self._set(engine, serving=False)
            for _ in range(_ENDING_POLLS):  # a process ends a moment after its connection
                if ended := self.launcher.ended(engine.index):
                    return f"{reason}; {ended}"
                await asyncio.sleep(_POLL_SECONDS / 2)
            return reason
        finally:
            starting.cancel()
            minding.cancel()

    async def _mind(self, engine: Member, client: EngineClient) -> None:
        """Take a serving engine for lost that stands still; while it loads weights, that has its own time limit."""
        while not client.lost.done():
            await asyncio.sleep(_PING_SECONDS)
            if engine.serving and not engine.shipping.locked():
                with suppress(EngineLostError):
                    await self._within(self.answer_timeout, "answer", client, client.ping())

    async def _bring_up(self, engine: Member, client: EngineClient) -> None:
        await client.configure(self.spec, derive_seed(self.seed, engine.index, engine.losses))
        while engine.pushed < self._pushes:
            await self._update(engine)
            if client.lost.done():
                return
        await self._set(engine, serving=True)

    async def _update(self, engine: Member) -> None:
        """Ship the latest weights to one engine; if it is lost meanwhile, its supervisor sees to it."""
        async with engine.shipping:
            shipment, number = self._latest, self._pushes
            assert shipment is not None
            assert engine.client is not None
            if engine.pushed >= number:
                return
            try:
                work = engine.client.ship(shipment)
                loaded = await self._within(self.push_timeout, "load weights", engine.client, work)
            except EngineLostError:
                return
            self.pauses.append(loaded.seconds)
            engine.version, engine.pushed = loaded.version, number
        await self._set(engine)

    async def _within(self, seconds: float, what: str, client: EngineClient, work: Coroutine[Any, Any, T]) -> T:
        """Wait for an engine's answer, and no longer than ``seconds``, after which it counts as lost."""
        try:
            return await asyncio.wait_for(work, seconds)
        except TimeoutError:
            client.give_up(f"it did not {what} within {seconds:g} s")
            raise EngineLostError(client.lost.result()) from None

    async def _set(self, engine: Member, serving: bool | None = None) -> None:
        engine.serving = engine.serving if serving is None else serving
        await self.changed()
        for listener in self.listeners:
            listener()

    async def _least_loaded(self) -> EngineClient:
        await self.until(lambda: any(e.serving and e.version >= 0 for e in self._engines))
        ready = [e for e in self._engines if e.serving and e.version >= 0]
        client = min(ready, key=lambda e: e.client.pending if e.client else 0).client
        assert client is not None
        return client

    async def _stop(self) -> None:
        for task in self._supervisors:
            task.cancel()
        for engine in self._engines:
            if engine.client is not None:
                if self.launcher.owns:
                    engine.client.stop()
                engine.client.close(linger_ms=500)
        own = asyncio.current_task()
        others = [t for t in asyncio.all_tasks() if t is not own]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        self._context.term()
