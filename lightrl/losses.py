"""Policy losses token by token, and how tokens add up to one number.

A loss here returns ``(per_token_loss, metrics)``; metrics are detached, with NaN where they do not apply.
:func:`aggregate` makes a scalar of the former. Tensors are [N] (the completion tokens of a micro-batch end to end), or
of any shape where sequences do not matter. ``loss_mask`` (None: all live) drops a token before anything is computed
from it: NaN or inf in a masked slot reaches neither value nor gradient; in a live slot they stay.

Only ``logprobs`` gets gradient. Ratios exp(logprobs - old_logprobs) have their logarithm clamped to +-20 (masked.py):
the ratio stays finite, and a token past the limit has no gradient. Left out: the mean over a micro-batch (it depends on
how a batch is cut) and a switch over algorithms by name (override ``RLModule.loss``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightrl.masked import bounded_exp, check_shapes, live_or_nan, select_live, sequence_mean, sequence_sum

Terms = tuple[Tensor, dict[str, Tensor]]
"""Per-token loss, and per-token metrics by name."""

MODES = ("token", "sequence", "constant")


def aggregate(
    values: Tensor,
    loss_mask: Tensor,
    denominator: float | Tensor,
    *,
    mode: str = "token",
    sequence_ids: Tensor | None = None,
    num_sequences: int | None = None,
) -> Tensor:
    """Add up per-token values over the live tokens of one micro-batch, as its share of the optimizer step's loss.

    The shares of all micro-batches of all ranks sum to the loss, however the step was cut:

    * ``"token"``: sum / denominator, the step's live tokens (DAPO, arXiv 2503.14476).
    * ``"sequence"``: sum over sequences of the mean over its live tokens / denominator, the step's sequences (GRPO,
      arXiv 2402.03300). A sequence must be whole within its micro-batch; one without live tokens adds 0.
    * ``"constant"``: sum / denominator, the step's sequences x max_completion_tokens (Dr. GRPO, arXiv 2503.20783).

    Args:
        values: [N] or any shape.
        loss_mask: bool, the shape of values: the same mask that the denominator was counted with.
        denominator: Global count over the whole optimizer step.
        mode: How tokens are weighted.
        sequence_ids: int64, the shape of values: 0..S-1; needed for ``"sequence"``.
        num_sequences: S, where it is known: a GPU is then not waited for.

    Returns:
        A scalar; 0.0 with zero gradient where nothing is live, even if the denominator is 0.

    Raises:
        ValueError: If mode is unknown, sequence_ids is missing, or shapes differ.

    Example:
        >>> values, mask = torch.tensor([1.0, 3.0, 8.0]), torch.tensor([True, True, True])
        >>> ids = torch.tensor([0, 0, 1])
        >>> aggregate(values, mask, 3).item(), aggregate(values, mask, 2, mode="sequence", sequence_ids=ids).item()
        (4.0, 5.0)
    """
    if mode not in MODES:
        raise ValueError(f"mode={mode!r} is not an aggregation; choose one of {', '.join(MODES)}.")
    check_shapes(values=values, loss_mask=loss_mask, sequence_ids=sequence_ids)
    live = loss_mask.bool()
    (values,) = select_live(live, values)
    if mode == "sequence":
        if sequence_ids is None:
            raise ValueError('mode="sequence" needs sequence_ids.')
        values = values / sequence_sum(live.to(values.dtype), sequence_ids, num_sequences).clamp(min=1.0)
    # 0/0 is NaN. A denominator of 0 beside live tokens is a bug of the caller and shows as inf.
    return values.sum() / torch.where(live.any(), denominator, 1.0)


def reinforce_terms(logprobs: Tensor, advantages: Tensor, *, loss_mask: Tensor | None = None) -> Terms:
    """REINFORCE: ``-A log pi`` (Williams 1992; for language models arXiv 2402.14740).

    Args:
        logprobs: [N], current policy.
        advantages: [N].
        loss_mask: bool [N].

    Returns:
        Loss [N]; no metrics.

    Raises:
        ValueError: If shapes differ.
    """
    check_shapes(logprobs=logprobs, advantages=advantages, loss_mask=loss_mask)
    logprobs, advantages = select_live(loss_mask, logprobs, advantages.detach())
    return -advantages * logprobs, {}


def clipped_policy_terms(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    dual_clip: float | None = None,
    loss_mask: Tensor | None = None,
) -> Terms:
    """PPO's clipped surrogate: ``-min(r A, clip(r, 1 - low, 1 + high) A)`` with ``r = pi / pi_old``.

    arXiv 1707.06347; ``clip_ratio_high > clip_ratio_low`` is DAPO's clip-higher (arXiv 2503.14476). ``dual_clip`` c
    bounds the loss of tokens with A < 0 by ``-c A`` (arXiv 1912.09729).

    Args:
        logprobs: [N], current policy.
        old_logprobs: [N], policy before the first update on these rollouts.
        advantages: [N].
        clip_ratio_low: >= 0.
        clip_ratio_high: >= 0.
        dual_clip: > 1, or None.
        loss_mask: bool [N].

    Returns:
        Loss [N]; metrics ``ratio``, and 0 or 1 for ``clip_frac_low`` (A < 0 and r < 1 - low: the clipped branch is the
        active one), ``clip_frac_high`` (A > 0 and r > 1 + high), ``clip_frac`` (either).

    Raises:
        ValueError: If a clip range is negative, dual_clip is not above 1, or shapes differ.
    """
    check_shapes(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, loss_mask=loss_mask)
    _check_clip(clip_ratio_low, clip_ratio_high)
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip={dual_clip} must be above 1, or the loss would be clipped on-policy.")
    logprobs, old, adv = select_live(loss_mask, logprobs, old_logprobs.detach(), advantages.detach())
    ratio = bounded_exp(logprobs - old)
    loss = torch.maximum(-adv * ratio, -adv * ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high))
    if dual_clip is not None:
        loss = torch.where(adv < 0, torch.minimum(loss, -adv * dual_clip), loss)
    return loss, _clip_metrics(ratio, adv, clip_ratio_low, clip_ratio_high, loss_mask)


def gspo_terms(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequence_ids: Tensor,
    *,
    clip_ratio_low: float = 3e-4,
    clip_ratio_high: float = 4e-4,
    loss_mask: Tensor | None = None,
    num_sequences: int | None = None,
) -> Terms:
    """GSPO: PPO's clip with one ratio a sequence, ``s = exp(mean over its live tokens of log pi - log pi_old)``.

    arXiv 2507.18071, in its GSPO-token form ``s_t = sg(s) pi_t / sg(pi_t)``: same value and gradient where the tokens
    of a sequence share an advantage, and right where they do not. Meant for ``aggregate(mode="sequence")``.

    Args:
        logprobs: [N], current policy.
        old_logprobs: [N], policy before the first update on these rollouts.
        advantages: [N].
        sequence_ids: int64 [N], 0..S-1.
        clip_ratio_low: >= 0.
        clip_ratio_high: >= 0.
        loss_mask: bool [N].
        num_sequences: S, where it is known: a GPU is then not waited for.

    Returns:
        Loss [N]; metrics as :func:`clipped_policy_terms` has them, ``ratio`` being the sequence's.

    Raises:
        ValueError: If a clip range is negative or shapes differ.
    """
    check_shapes(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    check_shapes(logprobs=logprobs, loss_mask=loss_mask, sequence_ids=sequence_ids)
    _check_clip(clip_ratio_low, clip_ratio_high)
    logprobs, old, adv = select_live(loss_mask, logprobs, old_logprobs.detach(), advantages.detach())
    means = sequence_mean(logprobs.detach() - old, sequence_ids, loss_mask, num_sequences)
    ratio = bounded_exp(means) * torch.exp(logprobs - logprobs.detach())
    loss = torch.maximum(-adv * ratio, -adv * ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high))
    return loss, _clip_metrics(ratio, adv, clip_ratio_low, clip_ratio_high, loss_mask)


def cispo_terms(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_ratio_low: float = 1.0,
    clip_ratio_high: float = 4.0,
    loss_mask: Tensor | None = None,
) -> Terms:
    """CISPO: ``-sg(clip(r, 1 - low, 1 + high)) A log pi``: the weight is clipped, no token loses its gradient.

    arXiv 2506.13585 (MiniMax-M1). By default there is no lower bound (r > 0), as there, and r is cut at 5 (ScaleRL,
    arXiv 2510.13786, finds little difference between 4 and 8).

    Args:
        logprobs: [N], current policy.
        old_logprobs: [N], policy before the first update on these rollouts.
        advantages: [N].
        clip_ratio_low: >= 0.
        clip_ratio_high: >= 0.
        loss_mask: bool [N].

    Returns:
        Loss [N]; metrics ``ratio`` and, 0 or 1, ``clip_frac``: the weight was clipped, whatever the advantage.

    Raises:
        ValueError: If a clip range is negative or shapes differ.
    """
    check_shapes(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, loss_mask=loss_mask)
    _check_clip(clip_ratio_low, clip_ratio_high)
    logprobs, old, adv = select_live(loss_mask, logprobs, old_logprobs.detach(), advantages.detach())
    ratio = bounded_exp(logprobs.detach() - old)
    clipped = ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    metrics = {"ratio": live_or_nan(loss_mask, ratio), "clip_frac": live_or_nan(loss_mask, ratio != clipped)}
    return -clipped * adv * logprobs, metrics


def sapo_terms(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
    loss_mask: Tensor | None = None,
) -> Terms:
    """SAPO: ``-(4 / tau) sigmoid(tau (r - 1)) A``, a soft gate in place of a clip; its slope at r = 1 is 1.

    arXiv 2511.20347. tau is ``tau_positive`` where A > 0, else ``tau_negative``.

    Args:
        logprobs: [N], current policy.
        old_logprobs: [N], policy before the first update on these rollouts.
        advantages: [N].
        tau_positive: > 0; higher closes the gate faster.
        tau_negative: > 0.
        loss_mask: bool [N].

    Returns:
        Loss [N]; metric ``ratio``.

    Raises:
        ValueError: If a tau is not positive or shapes differ.
    """
    check_shapes(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, loss_mask=loss_mask)
    if not (tau_positive > 0 and tau_negative > 0):
        raise ValueError(f"tau_positive={tau_positive} and tau_negative={tau_negative} must be > 0.")
    logprobs, old, adv = select_live(loss_mask, logprobs, old_logprobs.detach(), advantages.detach())
    ratio = bounded_exp(logprobs - old)
    tau = torch.where(adv > 0, tau_positive, tau_negative)
    return -adv * torch.sigmoid(tau * (ratio - 1)) * (4 / tau), {"ratio": live_or_nan(loss_mask, ratio)}


def clipped_policy_loss(
    new_logprobs: Tensor, old_logprobs: Tensor, advantage: float | Tensor, clip: float = 0.2
) -> Tensor:
    """Mean PPO-clip loss over the completion tokens of one rollout (see :func:`clipped_policy_terms`).

    Args:
        new_logprobs: [..., L], L >= C: current policy. Only the last C positions count: it may cover the prompt too.
        old_logprobs: [..., C], the completion's logprobs before the first update.
        advantage: One number, or [..., C].
        clip: The ratio is clipped to 1 - clip .. 1 + clip.

    Returns:
        A scalar; 0.0 with zero gradient for an empty completion.

    Raises:
        ValueError: If L < C, clip is negative, or shapes do not match.

    Example:
        >>> new, old = torch.tensor([-9.0, 1.1, 2.0]), torch.tensor([1.0, 1.0])
        >>> new[1:].log_(), old.log_()
        (tensor([0.0953, 0.6931]), tensor([0., 0.]))
        >>> round(clipped_policy_loss(new, old, 0.5).item(), 4)  # -(0.5 * 1.1 + 0.5 * 1.2) / 2
        -0.575
    """
    surplus = new_logprobs.shape[-1] - old_logprobs.shape[-1]
    new = new_logprobs[..., max(0, surplus) :]
    if new.numel() != old_logprobs.numel():
        raise ValueError(f"new_logprobs {list(new_logprobs.shape)} do not cover {list(old_logprobs.shape)}.")
    old_logprobs = old_logprobs.to(new.device)
    new = new.reshape(old_logprobs.shape)  # the model's batch dimension of 1 may be on one of them only
    advantages = torch.as_tensor(advantage, device=new.device)
    advantages = advantages.expand_as(new) if advantages.numel() == 1 else advantages
    terms, _ = clipped_policy_terms(new, old_logprobs, advantages, clip_ratio_low=clip, clip_ratio_high=clip)
    return terms.sum() / max(1, terms.numel())


def _check_clip(low: float, high: float) -> None:
    if not (low >= 0 and high >= 0):
        raise ValueError(f"clip_ratio_low={low} and clip_ratio_high={high} must not be negative.")


def _clip_metrics(ratio: Tensor, advantages: Tensor, low: float, high: float, mask: Tensor | None) -> dict[str, Tensor]:
    clipped_low = (advantages < 0) & (ratio < 1 - low)
    clipped_high = (advantages > 0) & (ratio > 1 + high)
    metrics = {"ratio": ratio, "clip_frac": clipped_low | clipped_high}
    metrics |= {"clip_frac_low": clipped_low, "clip_frac_high": clipped_high}
    return {name: live_or_nan(mask, values) for name, values in metrics.items()}
