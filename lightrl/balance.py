"""Which rollouts go into which micro-batch: within the token budget, members of a group together, of about equal cost.

Ranks are balanced before, by moving whole groups between them: see :mod:`lightrl.moves`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from lightrl.distributed import all_objects
from lightrl.packing import MicroBatch, idle_rollout, pack
from lightrl.prefix import by_group
from lightrl.types import Rollout


@dataclass(frozen=True, slots=True)
class Packer:
    """Cuts rollouts into micro-batches and packs them.

    Example:
        Hidden size 4, sequences of 12, 6 and 6 tokens: costs 12 + 144 / 48 = 15, 6 + 36 / 48 = 6.75 and 6.75, so that
        two micro-batches cost 15 and 13.5. Shared, a prompt of 4 with completions of 2 and 2 is 8 tokens and not 12.
    """

    share_prefix: bool = False
    """What the members of a group have in common is one piece of the row, and counts once in budget and cost."""
    hidden_size: int = 1024
    """The model's, for the ratio of quadratic to linear work."""

    def plan(self, rollouts: list[Rollout], max_tokens: int) -> list[list[Rollout]]:
        """Cut rollouts into parts of at most ``max_tokens``: as many on every rank as the neediest has (a collective).

        A single rollout that is longer than that is a part of its own.
        """
        units = self._units(rollouts, max_tokens)
        own = max(1, -(-sum(min(u.tokens, max_tokens) for u in units) // max_tokens))
        while (parts := _deal(units, own, max_tokens)) is None:
            own += 1  # ends: with a bin for each unit there is always an empty one
        bins = max(all_objects(own))
        if bins > own:  # spread thinner, unless that happens not to fit
            parts = _deal(units, bins, max_tokens) or parts + [[]] * (bins - own)
        return [p or [idle_rollout()] for p in parts]

    def split(self, rollouts: list[Rollout], bins: int) -> list[list[Rollout]]:
        """Cut rollouts into ``bins`` parts of about equal cost, whatever their size in tokens."""
        parts = _deal(self._units(rollouts, math.inf), bins, math.inf)
        assert parts is not None
        return [p or [idle_rollout()] for p in parts]

    def pack(self, part: list[Rollout], *, temperature: float, denominator: float = 1.0) -> MicroBatch:
        """Lay one part end to end: see :func:`lightrl.packing.pack`."""
        return pack(part, temperature=temperature, denominator=denominator, share_prefix=self.share_prefix)

    def cost(self, length: int) -> float:
        """Work that a sequence of ``length`` tokens is, in units of a token's linear work.

        A layer of hidden size h has about 12 h^2 weights (4 h^2 in attention, 8 h^2 in the MLP): 24 h^2 FLOPs a token
        forward. Scores and their sum over values are 4 h FLOPs for each pair of a token and one that it sees, of which
        there are length^2 / 2. In units of 24 h^2: length + length^2 / (12 h). Backward is twice both. That a layer may
        have a short window is not counted.
        """
        return length + length**2 / (12 * self.hidden_size)

    def load(self, rollouts: list[Rollout]) -> float:
        """Cost of all of them together, what groups share counted once."""
        return sum(u.cost for u in self._units(rollouts, math.inf))

    def _units(self, rollouts: list[Rollout], max_tokens: float) -> list[_Unit]:
        groups = by_group(rollouts) if self.share_prefix else [([i], 0) for i in range(len(rollouts))]
        units: list[_Unit] = []
        for indices, prefix in groups:
            units += self._pieces([rollouts[i] for i in indices], prefix, max_tokens)
        return units

    def _pieces(self, members: list[Rollout], prefix: int, max_tokens: float) -> list[_Unit]:
        """Cut a group that does not fit into as few pieces as do; each repeats the prefix."""
        order = sorted(members, key=_size, reverse=True)
        for count in range(1, len(order) + 1):
            units = [_Unit() for _ in range(count)]
            for r in order:
                min(units, key=lambda u: u.cost).add(r, prefix, self.cost)
            if all(u.tokens <= max_tokens or len(u.rollouts) == 1 for u in units):
                break
        return units


@dataclass(slots=True)
class _Unit:
    """Rollouts that stay together; their prefix counts once. Its tokens' cost is the cost of a sequence that short."""

    rollouts: list[Rollout] = field(default_factory=list)
    tokens: int = 0
    cost: float = 0.0

    def add(self, r: Rollout, prefix: int, cost: Callable[[int], float]) -> None:
        shared = prefix if self.rollouts else 0
        self.tokens += _size(r) - shared
        self.cost += cost(_size(r)) - cost(shared)
        self.rollouts.append(r)


def _deal(units: list[_Unit], bins: int, max_tokens: float) -> list[list[Rollout]] | None:
    """Costliest first into the cheapest bin that has room (any unit fits an empty one), or None where none has."""
    parts = [_Unit() for _ in range(bins)]
    for unit in sorted(units, key=lambda u: u.cost, reverse=True):
        room = [p for p in parts if not p.rollouts or p.tokens + unit.tokens <= max_tokens]
        if not room:
            return None
        cheapest = min(room, key=lambda p: p.cost)
        cheapest.rollouts += unit.rollouts
        cheapest.tokens += unit.tokens
        cheapest.cost += unit.cost
    return [p.rollouts for p in parts]


def _size(r: Rollout) -> int:
    return len(r.prompt_ids) + len(r.completion_ids)
