"""What rollouts of a group have in common at their beginning: it needs to pass through the model only once.

One level of sharing: the prefix that all members of a group have. Deeper trees (some members have more in common) are
left out: completions sampled from one prompt rarely agree beyond it.
"""

from __future__ import annotations

from lightrl.types import Rollout


def by_group(rollouts: list[Rollout]) -> list[tuple[list[int], int]]:
    """Group rollouts that begin alike.

    Args:
        rollouts: in any order.

    Returns:
        (indices into ``rollouts``, tokens in common), by first appearance: of rollouts with one ``group_id`` the
        longest common prefix, or each by itself with 0 where there is none. A prefix leaves at least one token to each.

    Example:
        [5, 6, 7] and [5, 6, 8, 9] of group 0 and [4, 4] of group 1: [([0, 1], 2), ([2], 0)].
    """
    members: dict[int, list[int]] = {}
    for i, r in enumerate(rollouts):
        members.setdefault(r.group_id, []).append(i)
    found: list[tuple[list[int], int]] = []
    for indices in members.values():
        size = common_prefix([rollouts[i].prompt_ids + rollouts[i].completion_ids for i in indices])
        found += [(indices, size)] if size else [([i], 0) for i in indices]
    return found


def common_prefix(ids: list[list[int]]) -> int:
    """Return how many leading tokens all of ``ids`` share, the last token of the shortest never among them."""
    if len(ids) < 2:
        return 0
    low, high = min(ids), max(ids)  # what the first and the last in order share, those between share too
    limit = min(map(len, ids)) - 1
    return next((i for i in range(limit) if low[i] != high[i]), limit)
