"""GSPO: one ratio for a whole completion."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightrl.losses import Terms, gspo_terms
from lightrl.module import RLModule
from lightrl.packing import MicroBatch


class GSPO(RLModule):
    """Group sequence policy optimisation (arXiv:2507.18071).

    ``A_i = (r_i - mean of its group) / std of its group``, ``s_i = exp(mean over its tokens of log pi / pi_old)`` and

    ``L = mean over completions of -min(s A, clip(s, 1 - 0.0003, 1 + 0.0004) A)``

    Args:
        model: see :class:`lightrl.RLModule`.
        clip_ratio_low: a sequence's ratio moves far less than a token's.
        clip_ratio_high: likewise.
        aggregation: mean over completions.
        kwargs: RLModule's.
    """

    def __init__(
        self,
        model: Any,
        clip_ratio_low: float = 3e-4,
        clip_ratio_high: float = 4e-4,
        aggregation: str = "sequence",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            model,
            clip_ratio_low=clip_ratio_low,
            clip_ratio_high=clip_ratio_high,
            aggregation=aggregation,
            **kwargs,
        )

    def policy_terms(self, batch: MicroBatch, logprobs: Tensor, old: Tensor) -> Terms:
        """Return the clipped loss of each token's sequence, [N]."""
        return gspo_terms(
            logprobs,
            old,
            batch.advantages,
            clip_ratio_low=self.clip_ratio_low,
            clip_ratio_high=self.clip_ratio_high,
            **batch.by_sequence(),
        )
