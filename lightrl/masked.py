"""What losses, KL and corrections share: dropping masked tokens before any arithmetic, ratios, means by sequence."""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-20: exp(20) = 4.9e8. float32 overflows at exp(88.7), and its square at exp(44.4)."""


def check_shapes(**tensors: Tensor | None) -> None:
    """Raise ValueError unless all tensors have one shape: broadcasting [N] with [N, 1] would train on N * N tokens."""
    shapes = {name: tuple(t.shape) for name, t in tensors.items() if t is not None}
    if len(set(shapes.values())) > 1:
        raise ValueError("shapes differ: " + ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items()) + ".")


def select_live(loss_mask: Tensor | None, *tensors: Tensor) -> list[Tensor]:
    """Return the tensors in float32 or better, with 0 in every masked slot.

    Selecting afterwards would not do: the gradient of exp at NaN times 0 is NaN.
    """
    tensors = tuple(t.to(torch.promote_types(t.dtype, torch.float32)) for t in tensors)
    if loss_mask is None:
        return list(tensors)
    return [torch.where(loss_mask.bool(), t, 0.0) for t in tensors]


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Return exp of a log-ratio clamped to +-LOG_RATIO_LIMIT; past the limit the gradient is 0, and NaN stays NaN."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def live_or_nan(loss_mask: Tensor | None, values: Tensor) -> Tensor:
    """Return values detached, in float32 or better, with NaN (does not apply) in every masked slot."""
    values = values.detach().to(torch.promote_types(values.dtype, torch.float32))
    return values if loss_mask is None else torch.where(loss_mask.bool(), values, torch.nan)


def sequence_sum(values: Tensor, sequence_ids: Tensor, num_sequences: int | None = None) -> Tensor:
    """Sum values [N] over each sequence; the result [N] has at each token its sequence's sum.

    Without ``num_sequences`` the ids have to be looked at, for which a GPU is waited for.
    """
    if num_sequences is None:
        num_sequences = int(sequence_ids.max()) + 1 if sequence_ids.numel() else 0
    sums = values.new_zeros(num_sequences).index_add(0, sequence_ids.flatten(), values.flatten())
    return sums[sequence_ids]


def sequence_mean(
    values: Tensor, sequence_ids: Tensor, loss_mask: Tensor | None, num_sequences: int | None = None
) -> Tensor:
    """Mean over each sequence's live tokens, at each of its tokens; 0 where it has none. Masked values must be 0."""
    live = torch.ones_like(values) if loss_mask is None else loss_mask.to(values.dtype)
    counts = sequence_sum(live, sequence_ids, num_sequences)
    return sequence_sum(values, sequence_ids, num_sequences) / counts.clamp(min=1.0)
