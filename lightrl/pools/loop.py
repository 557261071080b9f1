"""An event loop on a thread of its own, for whoever has to wait for it on another."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

END_SECONDS = 3.0

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for other threads, which are told at once when the whole has failed.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        """Where everything happens."""
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._failure: asyncio.Future[Any] | None = None
        self._changed: asyncio.Condition | None = None

    @property
    def is_running(self) -> bool:
        """Whether the thread is there."""
        return self._thread.is_alive()

    def begin(self) -> None:
        """Start the thread."""
        self._thread.start()

    def end(self) -> None:
        """End the thread; may be called twice."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(END_SECONDS)
        if not self.loop.is_running() and not self.loop.is_closed():
            self.loop.close()

    def call(self, work: Coroutine[Any, Any, T], *, timeout: float, what: str) -> T:
        """Run a coroutine on the loop and wait for it.

        Args:
            work: what to run.
            timeout: seconds.
            what: named in the error.

        Raises:
            TimeoutError: it took longer.
            BaseException: what :meth:`fail` was given in the meantime.
        """
        future = asyncio.run_coroutine_threadsafe(self._guarded(work, timeout, what), self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # on Ctrl-C
            raise

    def run(self, work: Coroutine[Any, Any, T], seconds: float = END_SECONDS) -> T:
        """Run a coroutine on the loop, also after a failure: for cleaning up."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(seconds)

    async def _guarded(self, work: Coroutine[Any, Any, T], timeout: float, what: str) -> T:
        if self._failure is None:
            self._failure, self._changed = self.loop.create_future(), asyncio.Condition()
            self._failure.add_done_callback(lambda f: f.exception())  # seen, whoever asks
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._failure}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if self._failure.done():
                self._failure.result()
            raise TimeoutError(f"{what} did not end within {timeout:g} s")
        finally:
            task.cancel()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait, on the loop, until ``condition`` holds; it is looked at after every :meth:`changed`."""
        assert self._changed is not None
        async with self._changed:
            await self._changed.wait_for(condition)

    async def changed(self) -> None:
        """Wake whoever waits in :meth:`until`."""
        assert self._changed is not None
        async with self._changed:
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """End the run: whoever waits in :meth:`call`, now or later, gets ``error``."""
        if self._failure is not None and not self._failure.done():
            self._failure.set_exception(error)
