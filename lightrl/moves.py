"""Whole groups change ranks before a step, so that no rank trains for long while the others wait for it.

Completions' lengths are heavy-tailed and attention is quadratic: with lognormal lengths (sigma 1, groups of 8, hidden
size 1024) and prompts dealt round-robin, the most loaded of 8 ranks with 4 groups each has 1.37 times the mean work, of
32 ranks 1.48 times. Moving a tenth of the groups brings that to 1.07 and 1.09; nothing else is sent.
"""

from __future__ import annotations

from collections.abc import Callable

from lightrl.distributed import all_objects, rank
from lightrl.types import RolloutGroup

ENOUGH = 1.02
"""No group moves for less than this: the most loaded rank's work over the mean."""
_CLOSER = 1 - 1e-6  # a group as large as the gap would only change sides, and with rounding go back and forth


def even_out(groups: list[RolloutGroup], cost: Callable[[RolloutGroup], float]) -> list[RolloutGroup]:
    """Return the groups that this rank is to train on, given those that it sampled (a collective).

    Their rollouts get new group ids, which are a rank's own.
    """
    moves = plan_moves(all_objects([cost(g) for g in groups]))
    if not moves:
        return groups
    sent = all_objects({origin: groups[origin[1]] for origin in moves if origin[0] == rank()})
    stay = [g for i, g in enumerate(groups) if (rank(), i) not in moves]
    came = [theirs[origin] for theirs in sent for origin in sorted(theirs) if moves[origin] == rank()]
    mine = stay + came
    for group_id, group in enumerate(mine):
        for rollout in group.rollouts:
            rollout.group_id = group_id
    return mine


def plan_moves(costs: list[list[float]]) -> dict[tuple[int, int], int]:
    """Return (rank, place) to new rank of each group that moves; every rank finds the same.

    From the most to the least loaded rank goes the group that brings the two closest together, as long as one does.

    Example:
        >>> plan_moves([[3.0, 1.0, 2.0], [1.0, 1.0]])
        {(0, 2): 1}
    """
    held = [{(r, i): cost for i, cost in enumerate(theirs)} for r, theirs in enumerate(costs)]
    loads = [sum(theirs) for theirs in costs]
    for _ in range(sum(map(len, costs))):  # bounded: costs that round away beside others must not move for ever
        if max(loads) * len(loads) <= ENOUGH * sum(loads):
            break
        high, low = loads.index(max(loads)), loads.index(min(loads))
        gap = loads[high] - loads[low]
        fitting = {origin: cost for origin, cost in held[high].items() if 0 < cost < _CLOSER * gap}
        if not fitting:
            break
        origin = min(fitting, key=lambda o: abs(fitting[o] - gap / 2))
        held[low][origin] = held[high].pop(origin)
        loads = [sum(theirs.values()) for theirs in held]
    return {origin: r for r, theirs in enumerate(held) for origin in theirs if origin[0] != r}
