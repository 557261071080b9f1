"""CISPO: the importance weight is clipped, and no token loses its gradient."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightrl.losses import Terms, cispo_terms
from lightrl.module import RLModule
from lightrl.packing import MicroBatch


class CISPO(RLModule):
    """Clipped importance sampling policy optimisation (MiniMax-M1, arXiv:2506.13585).

    ``A_i = (r_i - mean of its group) / std of its group`` and, with ``rho = pi / pi_old`` and no gradient through it,

    ``L = mean over all tokens of -clip(rho, 0, 1 + 4) A log pi``

    Args:
        model: see :class:`lightrl.RLModule`.
        clip_ratio_low: 1 is no lower bound, as in the paper.
        clip_ratio_high: the paper tunes it; ScaleRL (arXiv:2510.13786) finds little difference between weights cut at 4
            and at 8.
        kwargs: RLModule's.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, model: Any, clip_ratio_low: float = 1.0, clip_ratio_high: float = 4.0, **kwargs: Any) -> None:
        super().__init__(model, clip_ratio_high=clip_ratio_high, **kwargs)
        if not 0 <= clip_ratio_low <= 1:
            raise ValueError(f"clip_ratio_low={clip_ratio_low} must be between 0 and 1")
        self.clip_ratio_low = clip_ratio_low

    def policy_terms(self, batch: MicroBatch, logprobs: Tensor, old: Tensor) -> Terms:
        """Return the weighted REINFORCE loss by token, [N]."""
        return cispo_terms(
            logprobs,
            old,
            batch.advantages,
            clip_ratio_low=self.clip_ratio_low,
            clip_ratio_high=self.clip_ratio_high,
            loss_mask=batch.loss_mask,
        )
