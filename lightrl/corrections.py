"""Off-policy corrections: weights for the gap between the policy that sampled a token and the one that trains on it.

Vocabulary: ``rollout_logprobs`` are the sampler's (behaviour policy); ``old_logprobs`` the trainer's before the first
update (proximal policy); ``logprobs`` the current policy's. A correction returns ``(weights, metrics)``, [N], detached:
multiply the per-token loss of :mod:`lightrl.losses` by the weights. Where a weight is 0 the token still counts in the
loss's denominator, unless ``weights > 0`` goes into ``loss_mask`` before counting. A masked slot has weight 0.

The classes at the end are the same functions with their thresholds bound, for ``RLModule(..., correction=...)``: there
a token of weight 0 does stay in the denominator, which is counted before the weights are known.

Log-ratios are clamped to +-20 (masked.py). Left out: any choice of thresholds by data.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightrl.kl import k3
from lightrl.losses import Terms
from lightrl.masked import bounded_exp, check_shapes, live_or_nan, select_live, sequence_mean, sequence_sum

if TYPE_CHECKING:
    from lightrl.packing import MicroBatch


def truncated_token_weights(
    old_logprobs: Tensor, rollout_logprobs: Tensor, *, cap: float = 2.0, loss_mask: Tensor | None = None
) -> Terms:
    """``min(pi_old / pi_rollout, cap)`` by token: truncated importance sampling (TIS; Yao et al. 2025).

    With :func:`lightrl.losses.clipped_policy_terms` this is decoupled PPO (arXiv 2110.00641; for language models AReaL,
    arXiv 2505.24298), ``cap=math.inf`` its plain form. :func:`approximate_proximal` saves the pass for old_logprobs.

    Args:
        old_logprobs: [N], the trainer's before the first update.
        rollout_logprobs: [N], the sampler's.
        cap: Largest weight, > 0.
        loss_mask: bool [N], or None for all live.

    Returns:
        Weights [N]; metrics ``ratio`` and, 0 or 1, ``truncated_frac`` (ratio above the cap).

    Raises:
        ValueError: If cap is not positive or shapes differ.

    Example:
        >>> old, rollout = torch.tensor([0.6, 0.6]).log(), torch.tensor([0.5, 0.1]).log()
        >>> [round(w, 4) for w in truncated_token_weights(old, rollout)[0].tolist()]
        [1.2, 2.0]
    """
    return _truncated(_log_ratio(old_logprobs, rollout_logprobs, loss_mask), cap, loss_mask)


def truncated_sequence_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    sequence_ids: Tensor,
    *,
    cap: float = 2.0,
    loss_mask: Tensor | None = None,
    num_sequences: int | None = None,
) -> Terms:
    """``min(prod over its live tokens of pi_old / pi_rollout, cap)``: one weight a sequence, unbiased but for the cap.

    Args:
        old_logprobs: [N], the trainer's before the first update.
        rollout_logprobs: [N], the sampler's.
        sequence_ids: int64 [N], 0..S-1.
        cap: Largest weight, > 0.
        loss_mask: bool [N], or None for all live.
        num_sequences: S, where it is known: a GPU is then not waited for.

    Returns:
        Weights [N]; metrics ``ratio`` and, 0 or 1, ``truncated_frac``, the sequence's at each of its tokens.

    Raises:
        ValueError: If cap is not positive or shapes differ.
    """
    check_shapes(old_logprobs=old_logprobs, sequence_ids=sequence_ids)
    log_ratio = _log_ratio(old_logprobs, rollout_logprobs, loss_mask)
    return _truncated(sequence_sum(log_ratio, sequence_ids, num_sequences), cap, loss_mask)


def masked_token_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    *,
    low: float = 0.5,
    high: float = 5.0,
    loss_mask: Tensor | None = None,
) -> Terms:
    """``pi_old / pi_rollout`` where it is within low..high, else 0: the token is left out (IcePop, arXiv 2510.18855).

    Args:
        old_logprobs: [N], the trainer's before the first update.
        rollout_logprobs: [N], the sampler's.
        low: Lowest ratio kept, >= 0.
        high: Highest ratio kept, > low.
        loss_mask: bool [N], or None for all live.

    Returns:
        Weights [N]; metrics ``ratio`` and, 0 or 1, ``rejected_frac``.

    Raises:
        ValueError: If not 0 <= low < high, or shapes differ.
    """
    _check_band(low, high)
    ratio = bounded_exp(_log_ratio(old_logprobs, rollout_logprobs, loss_mask))
    return _rejected(ratio, ratio, low, high, loss_mask)


def geometric_mean_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    sequence_ids: Tensor,
    *,
    low: float = 0.99,
    high: float = 1.01,
    loss_mask: Tensor | None = None,
    num_sequences: int | None = None,
) -> Terms:
    """1 where ``exp(mean over its live tokens of log pi_old - log pi_rollout)`` is within low..high, else 0.

    Rejects whole sequences whatever their length (a product of ratios drifts with it). From Liu, Li et al. 2025, "When
    Speed Kills Stability". Multiply with truncated weights to correct what is kept.

    Args:
        old_logprobs: [N], the trainer's before the first update.
        rollout_logprobs: [N], the sampler's.
        sequence_ids: int64 [N], 0..S-1.
        low: Lowest geometric mean kept, >= 0.
        high: Highest geometric mean kept, > low.
        loss_mask: bool [N], or None for all live.
        num_sequences: S, where it is known: a GPU is then not waited for.

    Returns:
        Weights [N], 0 or 1; metrics ``ratio`` (the geometric mean) and, 0 or 1, ``rejected_frac``.

    Raises:
        ValueError: If not 0 <= low < high, or shapes differ.
    """
    _check_band(low, high)
    check_shapes(old_logprobs=old_logprobs, sequence_ids=sequence_ids)
    log_ratio = _log_ratio(old_logprobs, rollout_logprobs, loss_mask)
    ratio = bounded_exp(sequence_mean(log_ratio, sequence_ids, loss_mask, num_sequences))
    return _rejected(ratio * 0 + 1, ratio, low, high, loss_mask)  # 1, but NaN stays visible


def approximate_proximal(logprobs: Tensor, rollout_logprobs: Tensor, staleness: Tensor) -> Tensor:
    """Stand-in for ``old_logprobs`` that costs no pass: the policy one update ago, between sampler and current.

    ``log pi_old = log pi_rollout + (s - 1) / s (log pi - log pi_rollout)`` for staleness s >= 1, ``log pi`` for 0. From
    AReaL, https://inclusionai.github.io/AReaL/algorithms/prox_approx.html.

    Args:
        logprobs: [N], current policy.
        rollout_logprobs: [N], the sampler's.
        staleness: int [N], updates since each token was sampled, this one not counted.

    Returns:
        float32 [N], detached.

    Raises:
        ValueError: If shapes differ.
    """
    check_shapes(logprobs=logprobs, rollout_logprobs=rollout_logprobs, staleness=staleness)
    current, rollout = select_live(None, logprobs.detach(), rollout_logprobs.detach())
    share = torch.where(staleness >= 1, (staleness - 1) / staleness.clamp(min=1), 1.0)
    return torch.lerp(rollout, current, share)


def mismatch_metrics(
    old_logprobs: Tensor, rollout_logprobs: Tensor, *, cap: float = 2.0, loss_mask: Tensor | None = None
) -> dict[str, Tensor]:
    """How far the trainer is from the sampler on the live tokens, before any correction.

    Args:
        old_logprobs: [N], the trainer's before the first update.
        rollout_logprobs: [N], the sampler's.
        cap: The ratio above which ``truncated_frac`` counts a token.
        loss_mask: bool [N], or None for all live.

    Returns:
        Scalars: ``logprob_diff_mean``, ``_p99`` (nearest rank) and ``_max`` of ``|log pi_old - log pi_rollout|``;
        ``mismatch_kl``, the k3 estimate of KL(rollout || old); ``effective_sample_size``, ``(sum w)^2 / (n sum w^2)``
        of the ratios, in 0..1; ``truncated_frac``. With nothing live: that size 1, the others 0.

    Raises:
        ValueError: If shapes differ.
    """
    log_ratio = _log_ratio(old_logprobs, rollout_logprobs, loss_mask).flatten()
    if loss_mask is not None:
        log_ratio = log_ratio[loss_mask.bool().flatten()]
    if not log_ratio.numel():
        log_ratio = log_ratio.new_zeros(1)
    gaps, ratio = log_ratio.abs(), bounded_exp(log_ratio)
    return {
        "logprob_diff_mean": gaps.mean(),
        "logprob_diff_p99": gaps.kthvalue(math.ceil(0.99 * gaps.numel())).values,
        "logprob_diff_max": gaps.max(),
        "mismatch_kl": k3(torch.zeros_like(log_ratio), log_ratio).mean(),
        "effective_sample_size": ratio.sum().square() / (ratio.numel() * ratio.square().sum()),
        "truncated_frac": (ratio > cap).to(ratio.dtype).mean(),
    }


def _log_ratio(old_logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor | None) -> Tensor:
    check_shapes(old_logprobs=old_logprobs, rollout_logprobs=rollout_logprobs, loss_mask=loss_mask)
    old, rollout = select_live(loss_mask, old_logprobs.detach(), rollout_logprobs.detach())
    return old - rollout


def _check_band(low: float, high: float) -> None:
    if not 0 <= low < high:
        raise ValueError(f"low={low} and high={high} must satisfy 0 <= low < high.")


def _check_cap(cap: float) -> None:
    if not cap > 0:
        raise ValueError(f"cap={cap} must be > 0.")


def _truncated(log_ratio: Tensor, cap: float, loss_mask: Tensor | None) -> Terms:
    _check_cap(cap)
    ratio = bounded_exp(log_ratio)
    (weights,) = select_live(loss_mask, ratio.clamp(max=cap))
    return weights, {"ratio": live_or_nan(loss_mask, ratio), "truncated_frac": live_or_nan(loss_mask, ratio > cap)}


def _rejected(weights: Tensor, ratio: Tensor, low: float, high: float, loss_mask: Tensor | None) -> Terms:
    outside = (ratio < low) | (ratio > high)
    (weights,) = select_live(loss_mask, weights.masked_fill(outside, 0.0))
    return weights, {"ratio": live_or_nan(loss_mask, ratio), "rejected_frac": live_or_nan(loss_mask, outside)}


Correction = Callable[["MicroBatch", Tensor], Terms]
"""From a micro-batch and its old_logprobs [N]: weights [N], detached, and per-token metrics by name."""


@dataclass(frozen=True)
class TruncatedToken:
    """:func:`truncated_token_weights` with its ``cap``; ``TruncatedToken(math.inf)`` makes PPO decoupled PPO."""

    cap: float = 2.0

    def __post_init__(self) -> None:
        _check_cap(self.cap)

    def __call__(self, batch: MicroBatch, old: Tensor) -> Terms:
        """Return weights and metrics, [N]."""
        return truncated_token_weights(old, batch.rollout_logprobs, cap=self.cap, loss_mask=batch.loss_mask)


@dataclass(frozen=True)
class TruncatedSequence(TruncatedToken):
    """:func:`truncated_sequence_weights` with its ``cap``."""

    def __call__(self, batch: MicroBatch, old: Tensor) -> Terms:
        """Return weights and metrics, [N]."""
        return truncated_sequence_weights(old, batch.rollout_logprobs, cap=self.cap, **batch.by_sequence())


@dataclass(frozen=True)
class MaskedToken:
    """:func:`masked_token_weights` with its band."""

    low: float = 0.5
    high: float = 5.0

    def __post_init__(self) -> None:
        _check_band(self.low, self.high)

    def __call__(self, batch: MicroBatch, old: Tensor) -> Terms:
        """Return weights and metrics, [N]."""
        return masked_token_weights(
            old, batch.rollout_logprobs, low=self.low, high=self.high, loss_mask=batch.loss_mask
        )


@dataclass(frozen=True)
class GeometricMean(MaskedToken):
    """:func:`geometric_mean_weights` with its band."""

    low: float = 0.99
    high: float = 1.01

    def __call__(self, batch: MicroBatch, old: Tensor) -> Terms:
        """Return weights and metrics, [N]."""
        return geometric_mean_weights(old, batch.rollout_logprobs, low=self.low, high=self.high, **batch.by_sequence())
