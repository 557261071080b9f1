"""One event loop, on a thread of its own, for rewards that are ``async def``."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from lightrl.rewards.pool import Abandoned, Outcome, overdue, stop_thread

AsyncCall = Callable[[], Coroutine[Any, Any, Any]]
_POLL_SECONDS = 0.25


class AsyncJob:
    """Calls on their way: :meth:`EventLoopThread.wait` returns their outcomes."""

    def __init__(self, calls: Sequence[AsyncCall], fail_fast: bool) -> None:
        self.calls = calls
        self.fail_fast = fail_fast
        self.outcomes: list[Outcome | None] = [None] * len(calls)
        self.tasks: dict[asyncio.Task[Outcome], int] = {}
        self.generation = 0
        self.done = threading.Event()

    def finish(self, index: int, outcome: Outcome) -> None:
        """Keep the first outcome of a call."""
        if self.outcomes[index] is None:
            self.outcomes[index] = outcome
        if self.fail_fast and outcome.error is not None:
            self.done.set()


class EventLoopThread:
    """Runs coroutines with a deadline each; the loop lives as long as this object, so that rewards may keep sessions.

    A call that blocks the loop itself is overdue like any other: the thread is abandoned, and the calls that it had not
    finished start again on a new loop.

    Args:
        timeout: Seconds that each call may take, counted from its own start.
        max_calls: How many run at the same time.
    """

    def __init__(self, timeout: float, max_calls: int) -> None:
        self.timeout = timeout
        self.max_calls = max_calls
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def start(self, calls: Sequence[AsyncCall], fail_fast: bool = False) -> AsyncJob:
        """Start all calls and return at once."""
        job = AsyncJob(calls, fail_fast)
        if not calls:
            job.done.set()
        else:
            asyncio.run_coroutine_threadsafe(self._run(job), self._running_loop())
        return job

    def wait(self, job: AsyncJob) -> list[Outcome | None]:
        """Return the outcomes of a job; None only where ``fail_fast`` stopped a call."""
        while not job.done.is_set():
            alive = threading.Event()
            loop = self._running_loop()
            loop.call_soon_threadsafe(alive.set)
            if alive.wait(self.timeout):
                job.done.wait(_POLL_SECONDS)
            elif not job.done.is_set():
                self._replace_blocked(job, loop)
        return list(job.outcomes)

    def close(self, closers: Sequence[AsyncCall] = ()) -> None:
        """End the loop and its thread, after calling ``closers`` on it; a later :meth:`start` makes new ones.

        Calls that run on another thread's behalf end with an error, so that nobody waits for them.
        """
        if self._loop is not None and self._thread is not None:
            closing = asyncio.run_coroutine_threadsafe(_all_of(closers), self._loop)
            with suppress(TimeoutError):  # a loop that does not answer is left behind
                closing.result(timeout=2.0)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=2.0)
        self._loop = self._thread = None

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=serve, args=(self._loop,), name="lightrl-reward-loop", daemon=True)
            self._thread.start()
        return self._loop

    def _replace_blocked(self, job: AsyncJob, loop: asyncio.AbstractEventLoop) -> None:
        blocking = asyncio.current_task(loop)
        guilty = [i for task, i in list(job.tasks.items()) if task is blocking]
        for index in guilty or list(job.tasks.values()):
            job.finish(index, overdue(self.timeout))
        job.tasks = {}
        job.generation += 1
        if self._thread is not None:
            stop_thread(self._thread)
        self._loop = self._thread = None
        if None in job.outcomes and not job.done.is_set():
            asyncio.run_coroutine_threadsafe(self._run(job), self._running_loop())
        else:
            job.done.set()

    async def _run(self, job: AsyncJob) -> None:
        slots, generation = asyncio.Semaphore(self.max_calls), job.generation
        todo = [i for i, outcome in enumerate(job.outcomes) if outcome is None]
        try:
            await asyncio.gather(*(self._run_one(job, i, slots, generation) for i in todo))
        except asyncio.CancelledError:  # the loop ends; unless another one has taken over, so does the job
            if job.generation == generation:
                for index in todo:
                    job.finish(index, Outcome(error=RuntimeError("rewards were closed while this call ran")))
                job.done.set()
            raise
        job.done.set()

    async def _run_one(self, job: AsyncJob, index: int, slots: asyncio.Semaphore, generation: int) -> None:
        async with slots:
            if job.done.is_set() or job.generation != generation:
                return
            task = asyncio.ensure_future(_guarded(job.calls[index]))
            job.tasks[task] = index
            # Not wait_for: it waits for a cancelled call to end, which a call that catches the cancellation never does.
            await asyncio.wait({task}, timeout=self.timeout)
            if job.generation != generation:
                return
            job.tasks.pop(task, None)
            if task.done():
                job.finish(index, task.result())
            else:
                task.cancel()
                job.finish(index, overdue(self.timeout))


async def _all_of(calls: Sequence[AsyncCall]) -> None:
    await asyncio.gather(*(call() for call in calls), return_exceptions=True)


async def _guarded(call: AsyncCall) -> Outcome:
    try:
        return Outcome(value=await call())
    except Abandoned as error:
        # Or this loop would go on with the other calls, which a new loop has taken over.
        asyncio.get_running_loop().stop()
        return Outcome(error=error)
    except BaseException as error:
        return Outcome(error=error)


def serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop on this thread until it is stopped, or the thread abandoned."""
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=1.0))
    except Abandoned:
        return
