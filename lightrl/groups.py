"""Rewards by group: who was scored, how many, and whether they differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Rewards = Tensor | Sequence[float | None]
"""[R], NaN or None where nobody scored."""

SAME = 1e-6
"""Rewards whose spread is within this share of the largest magnitude (1e-12 in absolute terms) are equal: rounding in a
sum of reward terms is no signal, and dividing by such a spread would make it one of full size."""


def as_float64(rewards: Rewards) -> Tensor:
    """Return the rewards as a float64 tensor, NaN where nobody scored."""
    if isinstance(rewards, Tensor):
        return rewards.detach().double()
    return torch.tensor([math.nan if r is None else r for r in rewards], dtype=torch.float64)


def has_spread(low: Tensor, high: Tensor) -> Tensor:
    """Tell whether the lowest and the highest reward of a group differ (see SAME)."""
    return high - low > SAME * torch.maximum(low.abs(), high.abs()).clamp(min=SAME)


@dataclass(frozen=True)
class Groups:
    """Rewards with what is known of each one's group; every tensor is [R], in the order of the input."""

    rewards: Tensor
    """float64, 0 where nobody scored."""
    live: Tensor
    """bool: somebody scored."""
    index: Tensor
    """int64, 0..number of groups - 1."""
    counts: Tensor
    """float64, scored rollouts of the group."""
    spread: Tensor
    """bool: the group's scored rewards are not all the same."""

    @classmethod
    def of(cls, rewards: Rewards, group_ids: Tensor | Sequence[int]) -> Groups:
        """Group rewards [R] by group_ids [R]; ValueError if the lengths differ or a reward is infinite."""
        values = as_float64(rewards)
        ids = torch.as_tensor(group_ids, device=values.device)
        if values.dim() != 1 or ids.shape != values.shape:
            raise ValueError(f"rewards and group_ids must both be [R], got {list(values.shape)} and {list(ids.shape)}.")
        if bool(values.isinf().any()):
            raise ValueError(f"reward {int(values.isinf().nonzero()[0])} is infinite; use NaN where nobody scored.")
        live = ~values.isnan()
        index = torch.unique(ids, return_inverse=True)[1]
        values = torch.where(live, values, 0.0)
        counts = _over_group(live.double(), index, "sum")
        low = _over_group(torch.where(live, values, torch.inf), index, "amin")
        high = _over_group(torch.where(live, values, -torch.inf), index, "amax")
        return cls(values, live, index, counts, has_spread(low, high))

    def sum(self, values: Tensor) -> Tensor:
        """Sum of the scored rollouts' values, over each one's group."""
        return _over_group(torch.where(self.live, values, 0.0), self.index, "sum")

    def mean(self, values: Tensor) -> Tensor:
        """Mean of the scored rollouts' values, over each one's group."""
        return self.sum(values) / self.counts

    def std(self) -> Tensor:
        """Unbiased standard deviation of the group's scored rewards; 0 or NaN without spread."""
        centred = self.rewards - self.mean(self.rewards)
        return (self.sum(centred.square()) / (self.counts - 1)).sqrt()

    def finish(self, advantages: Tensor) -> Tensor:
        """Return float32 advantages, exactly 0 where the rollout was not scored or its group has no spread."""
        return torch.where(self.live & self.spread, advantages, 0.0).float()


def _over_group(values: Tensor, index: Tensor, how: str) -> Tensor:
    groups = int(index.max()) + 1 if index.numel() else 0
    return values.new_zeros(groups).scatter_reduce(0, index, values, how, include_self=False)[index]
