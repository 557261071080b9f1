"""The chunked logprobs of :mod:`lightrl.logprobs` on a GPU: each chunk's logits are read once, by a kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

CHUNK_SIZE = 2**28
"""Logits held at once: 512 MiB in bfloat16."""


def _kernels(hidden: Tensor) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Return what computes statistics and gradient where ``hidden`` lies."""
    if not hidden.is_cuda:
        return statistics, gradient
    from lightrl import head_kernels

    return head_kernels.statistics, head_kernels.gradient


class FusedLogprobs(torch.autograd.Function):
    """Forward in chunks of tokens, backward in chunks of vocabulary, which computes the logits again.

    The gradient of the weight needs that of the loss to each logprob, which any loss of a user's own may define: so it
    cannot be made in the forward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        entropy_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        """See :func:`lightrl.logprobs.chunked_token_logprobs`."""
        found = hidden.new_empty((3, len(hidden)), dtype=torch.float32)
        statistics_of, _ = _kernels(hidden)
        with torch.autocast(hidden.device.type, enabled=False):
            for part in _parts(len(hidden), chunk_size // len(weight)):
                logits = hidden[part] @ weight.T
                found[:, part] = statistics_of(logits, bias, targets[part], temperature)
        logprobs, log_z, entropies = found.unbind()
        ctx.save_for_backward(hidden, weight, bias, targets, log_z, entropies)
        ctx.temperature, ctx.chunk_size = temperature, chunk_size
        ctx.set_materialize_grads(False)
        if not entropy_grad:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden, weight and bias."""
        hidden, weight, bias, targets, log_z, entropies = ctx.saved_tensors
        grad_logprobs = torch.zeros_like(log_z) if grads[0] is None else grads[0]
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if ctx.needs_input_grad[0] else None
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        grad_bias = torch.empty_like(bias) if ctx.needs_input_grad[2] else None
        _, gradient_of = _kernels(hidden)
        with torch.autocast(hidden.device.type, enabled=False):
            for part in _parts(len(weight), ctx.chunk_size // max(1, len(hidden))):
                logits = hidden @ weight[part].T
                grad = gradient_of(
                    logits,
                    None if bias is None else bias[part],
                    targets - part.start,
                    log_z,
                    entropies,
                    grad_logprobs,
                    grads[1],
                    ctx.temperature,
                )
                del logits
                if grad_bias is not None:
                    grad_bias[part] = grad.float().sum(0)
                if grad_hidden is not None:
                    grad_hidden += grad @ weight[part]
                if grad_weight is not None:
                    torch.mm(grad.T, hidden, out=grad_weight[part])
        grad_hidden = None if grad_hidden is None else grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def statistics(logits: Tensor, bias: Tensor | None, targets: Tensor, temperature: float) -> Tensor:
    """Return logprob of the target, log of the normaliser, and entropy of each row: float32 [3, n] of logits [n, V]."""
    scores = _scores(logits, bias, temperature)
    top = scores.amax(-1, keepdim=True)
    scores = scores - top  # what is certain has a small entropy, which a difference of large numbers would lose
    weights = scores.exp()
    total = weights.sum(-1)
    picked = scores.gather(-1, targets[:, None])[:, 0]
    mean = torch.where(weights == 0.0, 0.0, weights * scores).sum(-1) / total  # 0 * -inf would be NaN
    return torch.stack([picked - total.log(), total.log() + top[:, 0], total.log() - mean])


def gradient(
    logits: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    log_z: Tensor,
    entropies: Tensor,
    grad_logprobs: Tensor,
    grad_entropies: Tensor | None,
    temperature: float,
) -> Tensor:
    """Return the gradient of one vocabulary chunk's logits [n, c], in their dtype.

    d logprob / d logit_v = [v is the target] - p_v;  d entropy / d logit_v = -p_v (log p_v + entropy).

    Args:
        logits: of the chunk.
        bias: of the chunk's tokens, or None.
        targets: int64 [n], counted from the chunk's first token.
        log_z: float32 [n], over the whole vocabulary.
        entropies: float32 [n].
        grad_logprobs: float32 [n].
        grad_entropies: float32 [n], or None for zero.
        temperature: of sampling.
    """
    scores = _scores(logits, bias, temperature) - log_z[:, None]
    is_target = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    inner = grad_logprobs[:, None]
    if grad_entropies is not None:
        inner = inner + grad_entropies[:, None] * (scores + entropies[:, None])
    grad = torch.where(is_target, grad_logprobs[:, None], 0.0) - scores.exp() * inner
    return (grad / temperature).to(logits.dtype)


def _scores(logits: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    scores = logits.float()
    return (scores if bias is None else scores + bias) / temperature


def _parts(size: int, step: int) -> Iterator[slice]:
    # A power of two: rows that begin at multiples of 16 bytes, without which matrix products take kernels of a tenth of
    # the speed.
    step = 1 << max(step, 1).bit_length() - 1
    return (slice(start, start + step) for start in range(0, size, step))
