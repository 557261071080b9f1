"""GRPO as published: RLModule with the paper's KL and mean over sequences."""

from __future__ import annotations

from typing import Any

from lightrl.module import RLModule


class GRPO(RLModule):
    """Group relative policy optimisation (DeepSeekMath, arXiv:2402.03300).

    ``A_i = (r_i - mean of its group) / std of its group`` and, with ``rho = pi / pi_old``,

    ``L = mean over completions of mean over tokens of -min(rho A, clip(rho, 1 - 0.2, 1 + 0.2) A) + 0.04 KL(pi || ref)``

    RLModule's own defaults are what most train with today: no KL, and the mean over all tokens. Unlike the paper's, the
    KL term's gradient is the reverse KL's (:func:`lightrl.kl.reverse_kl`; its value is the paper's k3).

    Args:
        model: see :class:`lightrl.RLModule`.
        kl_coef: beta.
        aggregation: mean over completions of their token means.
        kwargs: RLModule's.
    """

    def __init__(self, model: Any, kl_coef: float = 0.04, aggregation: str = "sequence", **kwargs: Any) -> None:
        super().__init__(model, kl_coef=kl_coef, aggregation=aggregation, **kwargs)
