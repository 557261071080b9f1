"""Threads that run reward calls, each with a deadline that returns whatever the call does.

A thread cannot be killed. One whose call is overdue is abandoned: it is told to stop by an exception (which ends a busy
loop in Python), and if it is stuck below Python (a sleep, a socket) it is left behind as a daemon, which holds up
neither the others nor the interpreter's exit. A new thread takes its place at once. What holds the interpreter lock
inside one C call (a regular expression that backtracks for ever) stops every thread of the process, this watchdog too:
such a reward belongs in a process of its own.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a call ended: with a value, or with an error."""

    value: Any = None
    error: BaseException | None = None
    """What it raised; a :class:`RewardTimeoutError` where it took too long."""


class RewardTimeoutError(TimeoutError):
    """A reward call took longer than its time limit."""


class Abandoned(BaseException):
    """Raised inside an overdue call to end it: no ``except Exception`` in a reward holds it up."""


def overdue(timeout: float) -> Outcome:
    """Return the outcome of a call that took longer than ``timeout`` seconds."""
    return Outcome(error=RewardTimeoutError(f"it did not return within {timeout:g} s"))


def stop_thread(thread: threading.Thread) -> None:
    """Raise :class:`Abandoned` in a thread at its next step in Python; the caller makes sure that it is alive."""
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Abandoned))


def run_calls(
    calls: Sequence[Callable[[], Any]], *, timeout: float, workers: int, fail_fast: bool = False
) -> list[Outcome | None]:
    """Run calls on ``workers`` daemon threads.

    Args:
        calls: Functions without arguments.
        timeout: Seconds that each may take, counted from its own start.
        workers: How many run at the same time.
        fail_fast: Stop at the first error; what has not ended by then has no outcome.

    Returns:
        One outcome for each call, None only where ``fail_fast`` stopped it.
    """
    job = _Job(calls, fail_fast)
    team = [_start(job) for _ in range(min(workers, len(calls)))]
    try:
        while calls and not job.done.wait(_until_next_deadline(team, timeout)):
            team = [_start(job) if worker.abandon_if_overdue(timeout) else worker for worker in team]
    finally:
        # Also on Ctrl-C: no thread takes another call.
        job.done.set()
    return list(job.outcomes)


class _Job:
    def __init__(self, calls: Sequence[Callable[[], Any]], fail_fast: bool) -> None:
        self.calls = calls
        self.indices: Iterator[int] = iter(range(len(calls)))
        self.outcomes: list[Outcome | None] = [None] * len(calls)
        self.remaining = len(calls)
        self.fail_fast = fail_fast
        self.lock = threading.Lock()
        self.done = threading.Event()

    def next_index(self) -> int | None:
        with self.lock:
            return None if self.done.is_set() else next(self.indices, None)

    def finish(self, index: int, outcome: Outcome) -> None:
        with self.lock:
            self.outcomes[index] = outcome
            self.remaining -= 1
            if self.remaining == 0 or (self.fail_fast and outcome.error is not None):
                self.done.set()


class _Worker(threading.Thread):
    """Takes calls from a job until none is left, or until it is abandoned."""

    def __init__(self, job: _Job) -> None:
        super().__init__(name="lightrl-reward", daemon=True)
        self.job = job
        self.index: int | None = None
        self.started = 0.0
        # One lock each: an abandoned thread may be ended while it holds this one, and then nobody wants it any more.
        self.lock = threading.Lock()
        self.abandoned = False

    def run(self) -> None:
        try:
            while (index := self.job.next_index()) is not None:
                self.started = monotonic()  # before the index: the watchdog reads them in the other order
                self.index = index
                outcome = self._call(index)
                with self.lock:
                    if self.abandoned:
                        return
                    self.index = None
                self.job.finish(index, outcome)
        except Abandoned:
            return

    def _call(self, index: int) -> Outcome:
        try:
            return Outcome(value=self.job.calls[index]())
        except BaseException as error:  # a reward that calls sys.exit() must not end the thread
            return Outcome(error=error)

    def abandon_if_overdue(self, timeout: float) -> bool:
        with self.lock:
            index = self.index
            if index is None or monotonic() - self.started < timeout:
                return False
            self.abandoned = True
            # Under the lock, so that the thread is still in this call and not gone, its identity in use by another.
            stop_thread(self)
        self.job.finish(index, overdue(timeout))
        return True


def _start(job: _Job) -> _Worker:
    worker = _Worker(job)
    worker.start()
    return worker


def _until_next_deadline(team: list[_Worker], timeout: float) -> float:
    now = monotonic()
    waits = [worker.started + timeout - now for worker in team if worker.index is not None]
    return max(0.001, min(waits, default=timeout))
