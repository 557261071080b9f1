"""Estimators of KL(policy || reference) = E_policy[log pi - log pi_ref], token by token, from the sampled tokens alone.

Any shape. All are exactly 0 where the two logprobs are equal. Higher is further: loss = policy loss + kl_coef * KL.
``k1``, ``k2`` and ``k3`` are Schulman's names ("Approximating KL divergence", 2020). Which to use:

* in the loss: :func:`reverse_kl` or ``k2``, whose gradient is the reverse KL's on samples of the policy. The gradient
  of ``k3`` is the forward KL's, that of ``k1`` is zero on average (arXiv 2506.09477).
* in the reward or as a metric: ``k1`` (unbiased, may be negative), ``k3`` (unbiased, never negative, less noisy).
  Only there does a token answer for the KL of the tokens after it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightrl.masked import bounded_exp, check_shapes, select_live

KL_LOG_RATIO_LIMIT = 10.0
"""k2 and k3 clamp log pi - log pi_ref to +-10, with no gradient past it: at most 50 (k2) or 22015.5 (k3) a token."""


def k1(logprobs: Tensor, ref_logprobs: Tensor, *, loss_mask: Tensor | None = None) -> Tensor:
    """``log pi - log pi_ref``: unbiased, may be negative, not clamped. Not for the loss: its mean gradient is zero.

    Args:
        logprobs: [N] or any shape, current policy.
        ref_logprobs: Same shape, reference.
        loss_mask: bool, same shape, or None for all live; a masked slot gives 0.

    Returns:
        float32, same shape.

    Raises:
        ValueError: If shapes differ.
    """
    return _log_ratio(logprobs, ref_logprobs, loss_mask)


def k2(logprobs: Tensor, ref_logprobs: Tensor, *, loss_mask: Tensor | None = None) -> Tensor:
    """``(log pi - log pi_ref)^2 / 2``: biased, never negative, on-policy gradient that of the reverse KL.

    Args:
        logprobs: [N] or any shape, current policy.
        ref_logprobs: Same shape, reference.
        loss_mask: bool, same shape, or None for all live; a masked slot gives 0.

    Returns:
        float32, same shape, at most 50 (see KL_LOG_RATIO_LIMIT).

    Raises:
        ValueError: If shapes differ.
    """
    return _clamped(_log_ratio(logprobs, ref_logprobs, loss_mask)).square() / 2


def k3(logprobs: Tensor, ref_logprobs: Tensor, *, loss_mask: Tensor | None = None) -> Tensor:
    """``pi_ref / pi - 1 - log(pi_ref / pi)``: unbiased, never negative (the penalty of GRPO, arXiv 2402.03300).

    Args:
        logprobs: [N] or any shape, current policy.
        ref_logprobs: Same shape, reference.
        loss_mask: bool, same shape, or None for all live; a masked slot gives 0.

    Returns:
        float32, same shape, at most 22015.5 (see KL_LOG_RATIO_LIMIT).

    Raises:
        ValueError: If shapes differ.

    Example:
        >>> round(k3(torch.tensor(0.5).log(), torch.tensor(0.25).log()).item(), 4)  # 1/2 - 1 + log 2
        0.1931
    """
    gap = -_clamped(_log_ratio(logprobs, ref_logprobs, loss_mask))
    # expm1 keeps the digits that exp(x) - 1 loses near 0; its last bit may still leave a value just below 0.
    return (torch.expm1(gap) - gap).clamp(min=0.0)


def reverse_kl(
    logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor | None = None, *, loss_mask: Tensor | None = None
) -> Tensor:
    """Value ``r k3``, gradient ``r (log pi - log pi_ref) grad log pi`` with ``r = pi / pi_old``: both unbiased.

    The gradient is the one that ``r k3`` has before clamping (arXiv 2512.02556), made by hand so that the clamp of k3
    does not bend it. On samples of ``pi_old`` its mean is the gradient of KL(pi || pi_ref).

    Args:
        logprobs: [N] or any shape, current policy.
        ref_logprobs: Same shape, reference.
        old_logprobs: Same shape, the policy that sampled the tokens; None: the current one (r = 1).
        loss_mask: bool, same shape, or None for all live; a masked slot gives 0.

    Returns:
        float32, same shape, never negative.

    Raises:
        ValueError: If shapes differ.
    """
    check_shapes(logprobs=logprobs, old_logprobs=old_logprobs, loss_mask=loss_mask)
    gap = k1(logprobs, ref_logprobs, loss_mask=loss_mask).detach()
    value = k3(logprobs, ref_logprobs, loss_mask=loss_mask).detach()
    (logprobs,) = select_live(loss_mask, logprobs)
    if old_logprobs is not None:
        (old_logprobs,) = select_live(loss_mask, old_logprobs.detach())
        ratio = bounded_exp(logprobs.detach() - old_logprobs)
        gap, value = gap * ratio, value * ratio
    return value + gap * (logprobs - logprobs.detach())


def _log_ratio(logprobs: Tensor, ref_logprobs: Tensor, loss_mask: Tensor | None) -> Tensor:
    check_shapes(logprobs=logprobs, ref_logprobs=ref_logprobs, loss_mask=loss_mask)
    logprobs, ref_logprobs = select_live(loss_mask, logprobs, ref_logprobs.detach())
    return logprobs - ref_logprobs


def _clamped(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-KL_LOG_RATIO_LIMIT, KL_LOG_RATIO_LIMIT)
