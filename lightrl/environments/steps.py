"""Environments' steps, many at once beside the engine, each with a deadline that holds whatever the step does.

A step starts on a thread of its own; if it is ``async def`` it goes on on one shared event loop. An overdue thread is
abandoned as in :mod:`lightrl.rewards.pool`. An overdue coroutine is cancelled; one that blocks the loop takes with it
the others that are on it, and later ones get a new loop.
"""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from lightrl.rewards.event_loop import serve
from lightrl.rewards.pool import Abandoned, Outcome, overdue, stop_thread

_LOOP_ANSWERS_WITHIN = 1.0  # seconds


@dataclass(slots=True, eq=False)
class _Step:
    key: int
    call: Callable[[], Any]
    started: float = 0.0
    thread: threading.Thread | None = None
    future: Future[Outcome] | None = None
    done: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    on_end: Callable[[Outcome], object] | None = None
    """Gets the outcome, on another thread; None: it is to be collected."""


class StepRunner:
    """Runs calls, plain or async. Their outcomes are collected in the order in which they end, or awaited one by one.

    Args:
        timeout: seconds that each may take, counted from its own start.
        at_once: how many run at the same time.
    """

    def __init__(self, timeout: float, at_once: int) -> None:
        self.timeout, self.at_once = timeout, at_once
        self._waiting: deque[_Step] = deque()
        self._running: dict[int, _Step] = {}
        self._ended: queue.SimpleQueue[tuple[_Step, Outcome]] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread: threading.Thread | None = None
        self._loop_lock, self._replacing = threading.Lock(), threading.Lock()
        self._places = asyncio.Semaphore(at_once)

    @property
    def pending(self) -> int:
        """Calls whose outcome was not handed back yet."""
        return len(self._waiting) + len(self._running)

    def submit(self, key: int, call: Callable[[], Any]) -> None:
        """Have ``call()`` run, and awaited if it returns an awaitable; ``key`` comes back with its outcome."""
        self._waiting.append(_Step(key, call))
        self._start_waiting()

    def collect(self, wait: float | None) -> list[tuple[int, Outcome]]:
        """Return (key, outcome) of calls that ended.

        Args:
            wait: seconds to wait for the first; None: until there is one.
        """
        until = None if wait is None else monotonic() + wait
        ended: list[tuple[int, Outcome]] = []
        while self.pending and not ended:
            ended = self._take(self._patience(until)) + self._abandon_overdue()
            self._start_waiting()
            if until is not None and monotonic() >= until:
                break
        return ended

    async def run(self, call: Callable[[], Any]) -> Outcome:
        """Run ``call()``, for a coroutine that waits for its outcome: :meth:`submit` and :meth:`collect` in one."""
        loop = asyncio.get_running_loop()
        async with self._places:
            outcome: asyncio.Future[Outcome] = loop.create_future()
            step = _Step(id(outcome), call, on_end=lambda value: loop.call_soon_threadsafe(_settle, outcome, value))
            self._start(step)
            try:
                await asyncio.wait({outcome}, timeout=self.timeout)
                # On a thread: it may have to wait for the event loop of the steps.
                late = not outcome.done() and await loop.run_in_executor(None, self._abandon, step)
            except asyncio.CancelledError:
                loop.run_in_executor(None, self._abandon, step)
                raise
            finally:
                self._running.pop(step.key, None)
            return overdue(self.timeout) if late else await outcome

    def close(self) -> None:
        """Abandon what still runs and end the event loop."""
        self._waiting.clear()
        for step in list(self._running.values()):
            self._abandon(step)
        self._running.clear()
        if self._loop is not None and self._loop_thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop_thread.join(timeout=2.0)
        self._loop = self._loop_thread = None

    def _start_waiting(self) -> None:
        while self._waiting and len(self._running) < self.at_once:
            self._start(self._waiting.popleft())

    def _start(self, step: _Step) -> None:
        self._running[step.key] = step
        step.started = monotonic()
        step.thread = threading.Thread(target=self._run, args=(step,), name="lightrl-step", daemon=True)
        step.thread.start()

    def _patience(self, until: float | None) -> float:
        deadline = min((s.started for s in self._running.values()), default=monotonic()) + self.timeout
        return max(0.0, min(deadline, deadline if until is None else until) - monotonic())

    def _take(self, patience: float) -> list[tuple[int, Outcome]]:
        ended = []
        try:
            while True:
                step, outcome = self._ended.get(timeout=patience) if patience else self._ended.get_nowait()
                if self._running.pop(step.key, None) is not None:
                    ended.append((step.key, outcome))
                patience = 0.0  # the others only if they have ended too
        except queue.Empty:
            return ended

    def _abandon_overdue(self) -> list[tuple[int, Outcome]]:
        late = [s for s in self._running.values() if monotonic() - s.started >= self.timeout]
        abandoned = [step for step in late if self._abandon(step)]
        for step in abandoned:
            del self._running[step.key]
        return [(step.key, overdue(self.timeout)) for step in abandoned]

    def _abandon(self, step: _Step) -> bool:
        with step.lock:
            if step.done:
                return False
            step.done = True
            if step.future is None and step.thread is not None:
                stop_thread(step.thread)  # under the lock: it cannot end before it has taken it
        if step.future is not None:
            step.future.cancel()
            self._replace_blocked_loop()
        return True

    def _replace_blocked_loop(self) -> None:
        with self._replacing:
            if self._loop is None or self._loop_thread is None:
                return
            alive = threading.Event()
            self._loop.call_soon_threadsafe(alive.set)
            if not alive.wait(_LOOP_ANSWERS_WITHIN):
                with self._loop_lock:
                    stop_thread(self._loop_thread)
                    self._loop = self._loop_thread = None

    def _run(self, step: _Step) -> None:
        try:
            try:
                value = step.call()
                if not inspect.isawaitable(value):
                    self._finish(step, Outcome(value=value))
                    return
                with step.lock:
                    if not step.done:
                        step.future = asyncio.run_coroutine_threadsafe(_awaited(value), self._running_loop())
                if step.future is not None:
                    step.future.add_done_callback(lambda future: self._finish(step, _outcome(future)))
            except BaseException as error:
                self._finish(step, Outcome(error=error))
        except Abandoned:
            return

    def _finish(self, step: _Step, outcome: Outcome) -> None:
        with step.lock:
            if step.done:
                return
            step.done = True
        if step.on_end is None:
            self._ended.put((step, outcome))
        else:
            step.on_end(outcome)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._loop_lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._loop_thread = threading.Thread(
                    target=serve, args=(self._loop,), name="lightrl-step-loop", daemon=True
                )
                self._loop_thread.start()
            return self._loop


async def _awaited(value: Awaitable[Any]) -> Outcome:
    try:
        return Outcome(value=await value)
    except Abandoned:
        asyncio.get_running_loop().stop()
        raise
    except BaseException as error:  # SystemExit would end the loop, and with it the others' steps
        return Outcome(error=error)


def _settle(future: asyncio.Future[Outcome], outcome: Outcome) -> None:
    if not future.done():
        future.set_result(outcome)


def _outcome(future: Future[Outcome]) -> Outcome:
    error = RuntimeError("it was cancelled") if future.cancelled() else future.exception()
    return Outcome(error=error) if error is not None else future.result()
