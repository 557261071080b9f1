"""RLOO: REINFORCE with the mean of the other completions as baseline."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightrl.advantages import leave_one_out
from lightrl.module import RLModule
from lightrl.types import RolloutBatch


class RLOO(RLModule):
    """REINFORCE leave-one-out (arXiv:2402.14740): a completion is one action, its KL part of its reward.

    ``A_i = r_i - mean of the others of its group``, ``r_i = reward - kl_coef sum over tokens of log pi / pi_ref`` and

    ``L = sum over tokens of -A log pi / (completions x longest allowed completion)``

    which is the paper's but for the constant longest completion; AdamW's step does not depend on that. Rollouts that
    are used again get PPO's clipped ratio in place of ``log pi`` (the same gradient at the first use).

    Args:
        model: see :class:`lightrl.RLModule`.
        kl_in_reward: the KL is part of the reward; the paper tunes ``kl_coef`` by task (here 0 unless given).
        scale_rewards: divide by the group's std (not in the paper).
        aggregation: sum over tokens by a constant.
        kwargs: RLModule's.
    """

    def __init__(
        self,
        model: Any,
        kl_in_reward: bool = True,
        scale_rewards: bool = False,
        aggregation: str = "constant",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            model, kl_in_reward=kl_in_reward, scale_rewards=scale_rewards, aggregation=aggregation, **kwargs
        )

    def estimate(self, rewards: Tensor, group_ids: Tensor, batch: RolloutBatch) -> Tensor:
        """Return leave-one-out advantages [R]."""
        return leave_one_out(rewards, group_ids, scale=self.scale_rewards)
