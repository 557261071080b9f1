"""REINFORCE++: advantages whitened over the whole batch instead of within groups."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightrl.advantages import reinforce_plus_plus, reinforce_plus_plus_baseline
from lightrl.distributed import all_objects, rank
from lightrl.module import RLModule
from lightrl.types import RolloutBatch


class REINFORCEPlusPlus(RLModule):
    """REINFORCE++ and REINFORCE++-baseline (arXiv:2501.03262).

    ``A_i = (r_i - mean) / std`` over the rollout batch of all ranks, ``r_i = reward - kl_coef sum of log pi / pi_ref``;
    with ``baseline``: ``A_i = (r_i - mean of its group) / std`` of these over the batch. With ``rho = pi / pi_old``,

    ``L = mean over all tokens of -min(rho A, clip(rho, 1 - 0.2, 1 + 0.2) A)``

    Unlike in the paper, a completion's KL is summed and counts alike for all its tokens.

    Args:
        model: see :class:`lightrl.RLModule`.
        baseline: subtract the group's mean first.
        kl_in_reward: the KL is part of the reward, where ``kl_coef`` is above 0.
        kwargs: RLModule's; ``scale_rewards=False`` is refused.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, model: Any, baseline: bool = False, kl_in_reward: bool = True, **kwargs: Any) -> None:
        super().__init__(model, kl_in_reward=kl_in_reward, **kwargs)
        if not self.scale_rewards:
            raise ValueError("scale_rewards=False: REINFORCE++ is the division by the batch's standard deviation")
        self.baseline = baseline
        self.min_group_size = 2 if baseline else 1

    def estimate(self, rewards: Tensor, group_ids: Tensor, batch: RolloutBatch) -> Tensor:
        """Return advantages [R] of this rank, whitened over all ranks (a collective)."""
        everywhere = all_objects((rewards, group_ids))
        whole = torch.cat([theirs for theirs, _ in everywhere])
        ids = torch.cat([torch.stack([torch.full_like(ids, r), ids], 1) for r, (_, ids) in enumerate(everywhere)])
        groups = torch.unique(ids, dim=0, return_inverse=True)[1]  # another rank's group 0 is another group
        found = (reinforce_plus_plus_baseline if self.baseline else reinforce_plus_plus)(whole, groups)
        start = sum(len(theirs) for theirs, _ in everywhere[: rank()])
        return found[start : start + len(rewards)]
