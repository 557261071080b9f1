"""What a pool knows of one engine."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field

from lightrl.engines.messages import Output
from lightrl.pools.client import EngineClient, EngineLostError

WINDOW_SECONDS = 3600.0
"""Losses that lie further back do not count."""


@dataclass(slots=True)
class Home:
    """The engine that the requests of a group go to, which remembers the tokens that they begin with."""

    client: EngineClient | None = None


@dataclass(slots=True, eq=False)
class Member:
    """One engine of a pool, through all processes that take its place."""

    index: int
    client: EngineClient | None = None
    version: int = -1
    """Optimizer steps done by the weights that it holds; -1: none."""
    pushed: int = 0
    """Number of the push that it holds; 0: none."""
    serving: bool = False
    losses: int = 0
    shipping: asyncio.Lock = field(default_factory=asyncio.Lock)
    _times: list[float] = field(default_factory=list)

    def hold(self) -> None:
        """Have it begin no step before the push that comes now."""
        if self.serving and self.client is not None:
            self.client.hold()

    async def running(self) -> list[Output]:
        """Return what it has sampled so far of requests that have not ended; nothing if it is lost."""
        if self.serving and self.client is not None:
            with suppress(EngineLostError):
                return await self.client.running()
        return []

    def note_loss(self) -> int:
        """Count a loss; return how many there were within the last hour."""
        now = time.monotonic()
        self.losses += 1
        self._times = [*(t for t in self._times if t > now - WINDOW_SECONDS), now]
        return len(self._times)
