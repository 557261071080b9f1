"""A reward in processes of its own, for calls that no thread can end: a regular expression that backtracks for ever."""

from __future__ import annotations

import inspect
import multiprocessing
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from lightrl.rewards.base import import_callable
from lightrl.rewards.pool import RewardTimeoutError

_PROGRAM = Path(__file__).with_name("child.py")
_START_SECONDS = 120.0


class ChildPool:
    """Child processes that call one function.

    Args:
        path: import path, ``"package.module:function"`` or ``"file.py:function"``.
        timeout: seconds that one call may take.
    """

    def __init__(self, path: str, timeout: float) -> None:
        if not timeout > 0:
            raise ValueError(f"timeout={timeout}: must be more than 0.")
        self.path, self.timeout = path, timeout
        self._idle: list[_Child] = []
        self._lock = threading.Lock()
        weakref.finalize(self, _end_all, self._idle)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the function returns; raises like :class:`KillableReward`."""
        with self._lock:
            child = self._idle.pop() if self._idle else None
        child = child or _Child(self.path, self.timeout)
        try:
            fine, value = child.ask((args, kwargs), self.timeout)
        except BaseException:  # also where this thread is told to stop
            child.end()
            raise
        with self._lock:
            self._idle.append(child)
        if not fine:
            raise RuntimeError(f"in the child process: {value}")
        return value

    def close(self) -> None:
        """End the children; a later call starts new ones."""
        with self._lock:
            _end_all(self._idle)


class KillableReward:
    """Calls a plain function in child processes; one whose call takes too long is killed.

    Each thread that calls it at the same time has a child, started when it is first needed, used again, and replaced
    after a kill. Arguments and results are copied.

    Args:
        function: a function of a module (not of the main program, no lambda), or its import path.
        timeout: seconds that one call may take; the start of a child does not count. Let it be below the datamodule's
            ``reward_timeout``.

    Raises:
        ValueError: another process could not find the function again.

    Example:
        >>> from lightrl.rewards import exact_match
        >>> KillableReward(exact_match, timeout=2.0).__name__
        'exact_match'
    """

    def __init__(self, function: Callable[..., Any] | str, timeout: float = 10.0) -> None:
        found: Any = import_callable(function, "reward") if isinstance(function, str) else function
        path = function if isinstance(function, str) else _path_of(found)
        self.__name__ = str(getattr(found, "__name__", type(found).__name__))
        self.__signature__ = inspect.signature(found)  # the arguments that it gets are those of the function
        self._pool = ChildPool(path if ":" in path else ":".join(path.rsplit(".", 1)), timeout)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the function returns.

        Raises:
            RewardTimeoutError: it took too long.
            RuntimeError: it raised, or ended its process.
        """
        return self._pool.call(*args, **kwargs)

    def close(self) -> None:
        """End the children; a later call starts new ones."""
        self._pool.close()


class _Child:
    def __init__(self, path: str, timeout: float) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        with theirs:
            command = [sys.executable, "-P", str(_PROGRAM), str(theirs.fileno())]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        try:
            fine, facts = self.ask((path, sys.path, timeout), _START_SECONDS)
        except BaseException:
            self.end()
            raise
        if not fine:
            self.end()
            raise ValueError(f"the child process cannot import {path!r}: {facts}")

    def ask(self, message: Any, timeout: float) -> tuple[bool, Any]:
        connection: Connection[Any, Any] = self.connection
        try:
            connection.send(message)
            if not connection.poll(timeout):
                raise RewardTimeoutError(f"it did not return within {timeout:g} s, and its process was killed")
            return connection.recv()  # type: ignore[no-any-return]
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            raise RuntimeError(f"its process ended with exit status {self.process.wait(5)}") from error

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()


def _end_all(children: list[_Child]) -> None:
    while children:
        children.pop().end()


def _path_of(function: Any) -> str:
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "<none>")
    if module in (None, "__main__") or "<" in name:
        raise ValueError(
            f"{function!r} cannot be found again by another process: put it at the top of a module of its own and give "
            "it, or its import path 'package.module:function'."
        )
    return f"{module}:{name}"
