"""Dr. GRPO: GRPO without its two biases."""

from __future__ import annotations

from typing import Any

from lightrl.module import RLModule


class DrGRPO(RLModule):
    """GRPO done right (arXiv:2503.20783): no division by the group's std, nor by a completion's own length.

    ``A_i = r_i - mean of its group`` and, with ``rho = pi / pi_old``,

    ``L = sum over tokens of -min(rho A, clip(rho, 1 - 0.2, 1 + 0.2) A) / (completions x longest allowed completion)``

    Args:
        model: see :class:`lightrl.RLModule`.
        scale_rewards: divide by the group's std after all.
        aggregation: sum over tokens by a constant.
        kwargs: RLModule's.
    """

    def __init__(self, model: Any, scale_rewards: bool = False, aggregation: str = "constant", **kwargs: Any) -> None:
        super().__init__(model, scale_rewards=scale_rewards, aggregation=aggregation, **kwargs)
