"""What this process is doing, since when, and how long it may."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

PHASES = ("setup", "swap", "generate", "push", "reward", "score", "train", "save", "load", "other")
SECONDS = 1800.0
"""How long a phase may take where nothing else is said."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One stretch of work."""

    number: int
    """How many there were before it: of ranks that wait for each other, the one with the lowest is waited for."""
    name: str
    started: float
    """Of the monotonic clock."""

    @property
    def seconds(self) -> float:
        """For how long."""
        return time.monotonic() - self.started


class Phases:
    """Keeps the phase of the thread that made it; a phase inside another has the clock to itself.

    Args:
        timeout: seconds that each phase may take, or by name, such as ``{"generate": 600}``.

    Raises:
        ValueError: a name is unknown, or a limit is not above 0.
    """

    def __init__(self, timeout: float | timedelta | Mapping[str, float] = SECONDS) -> None:
        if isinstance(timeout, timedelta):
            timeout = timeout.total_seconds()
        given = timeout if isinstance(timeout, Mapping) else dict.fromkeys(PHASES, timeout)
        for name, seconds in given.items():
            if name not in PHASES:
                raise ValueError(f"timeout has {name!r}, which is no phase: they are {', '.join(PHASES)}")
            if not seconds > 0:
                raise ValueError(f"timeout of {name}={seconds} must be above 0: it is seconds")
        self.limits: dict[str, float] = dict.fromkeys(PHASES, SECONDS) | dict(given)
        self.thread = threading.get_ident()
        self.now = Phase(0, "other", time.monotonic())

    def start(self) -> None:
        """Count from now, for the calling thread."""
        self.thread = threading.get_ident()
        self.now = Phase(self.now.number + 1, "other", time.monotonic())

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Be in phase ``name`` inside the block; on any other thread than its own, nothing."""
        if threading.get_ident() != self.thread:
            yield
            return
        outer = self.now.name
        self._enter(name)
        try:
            yield
        finally:
            self._enter(outer)

    def _enter(self, name: str) -> None:
        assert name in PHASES, name
        self.now = Phase(self.now.number + 1, name, time.monotonic())

    def late(self) -> str | None:
        """Say that the present phase takes longer than it may; None while it does not."""
        now = self.now
        limit = self.limits[now.name]
        if now.seconds <= limit:
            return None
        return f"in phase {now.name!r} for {now.seconds:.0f} s, more than timeout={limit:g} s"
