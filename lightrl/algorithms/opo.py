"""OPO: the baseline that minimises the gradient's variance."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightrl.advantages import opo
from lightrl.module import RLModule
from lightrl.types import RolloutBatch


class OPO(RLModule):
    """On-policy RL with the optimal reward baseline (arXiv:2505.23585).

    ``A_i = r_i - sum(length r) / sum(length)`` over its group and, strictly on-policy (one update for each rollout
    batch, without KL and entropy terms: the defaults),

    ``L = mean over all tokens of -A log pi``

    whose gradient PPO's clipped ratio has at the first use of a rollout; used again, that is what it gets.

    Args:
        model: see :class:`lightrl.RLModule`.
        scale_rewards: True is refused.
        kwargs: RLModule's.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, model: Any, scale_rewards: bool = False, **kwargs: Any) -> None:
        if scale_rewards:
            raise ValueError("scale_rewards=True: OPO's baseline is optimal for rewards as they are")
        super().__init__(model, scale_rewards=scale_rewards, **kwargs)

    def estimate(self, rewards: Tensor, group_ids: Tensor, batch: RolloutBatch) -> Tensor:
        """Return advantages [R] against the length-weighted mean."""
        return opo(rewards, group_ids, [len(r.completion_ids) for r in batch])
