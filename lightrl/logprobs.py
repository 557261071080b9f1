"""Token logprobs and entropy, from logits or straight from hidden states without full-vocabulary logits.

Everything here returns float32 whatever the model's dtype or autocast, and takes the sampling temperature inside, so
that trainer and sampler speak of the same distribution softmax(logits / temperature). Left out: top-k and top-p
(training samples from the whole distribution).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightrl.fused_logprobs import CHUNK_SIZE as FUSED_CHUNK_SIZE
from lightrl.fused_logprobs import FusedLogprobs

CHUNK_SIZE = 2**25
"""Logits that :func:`chunked_token_logprobs` holds at once on a CPU: 128 MiB of float32."""


def token_logprobs(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probability of each target token: ``log softmax(logits / temperature)[target]``.

    Args:
        logits: [..., V], any float dtype; upcast to float32 before the softmax.
        targets: int64 [...], the token that each row of logits predicts.
        temperature: The sampling temperature, > 0.

    Returns:
        float32 [...].

    Raises:
        ValueError: If temperature is not positive or the shapes do not match.

    Example:
        >>> round(token_logprobs(torch.tensor([[1.0, 3.0]]).log(), torch.tensor([1]), temperature=0.5).exp().item(), 6)
        0.9
    """
    _check_temperature(temperature)
    if logits.shape[:-1] != targets.shape:
        raise ValueError(f"logits {list(logits.shape)} do not match targets {list(targets.shape)}.")
    scores = torch.log_softmax(logits.float() / temperature, dim=-1)
    return scores.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Entropy of the sampling distribution in nats: ``-sum_v p_v log p_v`` with ``p = softmax(logits / temperature)``.

    Args:
        logits: [..., V], any float dtype; -inf means a token that cannot be sampled.
        temperature: The sampling temperature, > 0.

    Returns:
        float32 [...], with gradient.

    Raises:
        ValueError: If temperature is not positive.
    """
    _check_temperature(temperature)
    scores = torch.log_softmax(logits.float() / temperature, dim=-1)
    # 0 * -inf is NaN, while p log p goes to 0.
    return -(scores.exp() * scores.masked_fill(scores == -torch.inf, 0.0)).sum(-1)


def get_logprobs(logits: Tensor, token_ids: Tensor, temperature: float = 1.0) -> Tensor:
    """Logprob of every token of one sequence but the first, given the tokens before it.

    ``result[i]`` belongs to ``token_ids[i + 1]``: the last C entries are those of a completion of C tokens.

    Args:
        logits: [T, V] or [1, T, V], the model's output for ``token_ids``.
        token_ids: int64 [T] or [1, T], prompt and completion end to end.
        temperature: The sampling temperature, > 0.

    Returns:
        float32 [T - 1].

    Raises:
        ValueError: If there is more than one sequence, T differs, or temperature is not positive.
    """
    logits = logits.squeeze(0) if logits.dim() == 3 else logits
    token_ids = token_ids.squeeze(0) if token_ids.dim() == 2 else token_ids
    if logits.dim() != 2 or token_ids.dim() != 1 or len(logits) != len(token_ids):
        raise ValueError(
            f"get_logprobs takes one sequence: logits [T, V] and token_ids [T], got {list(logits.shape)} and "
            f"{list(token_ids.shape)}. For a batch use token_logprobs(logits[:, :-1], token_ids[:, 1:])."
        )
    return token_logprobs(logits[:-1], token_ids[1:].to(logits.device), temperature)


def chunked_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    chunk_size: int | None = None,
    with_entropy: bool = True,
    entropy_grad: bool = False,
) -> tuple[Tensor, Tensor]:
    """Logprobs and entropy from hidden states, never holding more than ``chunk_size`` logits, forward or backward.

    Equal to ``token_logprobs(hidden @ weight.T + bias, targets, temperature)``. The backward pass computes the logits
    again, but for the first ``chunk_size`` of them, which are kept. Matrix products run in the dtype of ``hidden``, all
    else in float32, autocast or not.

    Args:
        hidden: [N, D], the final hidden state of each position that predicts a token.
        weight: [V, D], the output head (tied or not), whole: gather a sharded one first.
        targets: int64 [N], the token each position predicts.
        temperature: The sampling temperature, > 0.
        bias: [V], the head's bias.
        chunk_size: Logits held at once; peak memory is about 4 times that in float32, beside the gradients. None:
            2^25 on a CPU, 2^28 on a GPU, where kernels of :mod:`lightrl.fused_logprobs` read them once.
        with_entropy: False skips the entropy (on a CPU it comes back as zeros; on a GPU it costs nothing).
        entropy_grad: True lets gradient flow through the entropy, for an entropy bonus.

    Returns:
        Logprobs float32 [N] and entropy float32 [N] (detached unless ``entropy_grad``).

    Raises:
        ValueError: If temperature or chunk_size is not positive, or the shapes do not match.
    """
    _check_temperature(temperature)
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size} must be at least 1.")
    if hidden.dim() != 2 or hidden.shape[1:] != weight.shape[1:] or targets.shape != hidden.shape[:1]:
        raise ValueError(
            f"expected hidden [N, D], weight [V, D], targets [N]; got {list(hidden.shape)}, {list(weight.shape)}, "
            f"{list(targets.shape)}."
        )
    weight = weight.to(hidden.dtype)
    if hidden.is_cuda:
        fused: Any = FusedLogprobs.apply
        found = fused(hidden, weight, bias, targets, temperature, chunk_size or FUSED_CHUNK_SIZE, entropy_grad)
        return found[0], found[1]
    apply: Any = _ChunkedLogprobs.apply
    logprobs, entropies = apply(
        hidden, weight, bias, targets, temperature, chunk_size or CHUNK_SIZE, with_entropy, entropy_grad
    )
    return logprobs, entropies


def _check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be > 0: greedy sampling has no logprobs to train on.")


def _scaled_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """Return float32 logits / temperature [n, v], in memory of their own."""
    logits = (hidden @ weight.T).float()
    if bias is not None:
        logits += bias
    return logits if temperature == 1.0 else logits.div_(temperature)


class _ChunkedLogprobs(torch.autograd.Function):
    """Forward in chunks of tokens, backward in chunks of vocabulary.

    Backward by vocabulary makes each row of the weight's gradient in one product over all tokens: chunks of tokens
    would add into the whole [V, D] gradient once for each, which is slower and, in bf16, loses digits.
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
        with_entropy: bool,
        entropy_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        n, v = len(hidden), len(weight)
        logprobs, log_z, entropies = hidden.new_zeros((3, n), dtype=torch.float32)
        rows = max(1, chunk_size // v)
        kept = logprobs.new_empty((0, v))
        with torch.autocast(hidden.device.type, enabled=False):
            for part in (slice(i, i + rows) for i in range(0, n, rows)):
                logits = _scaled_logits(hidden[part], weight, bias, temperature)
                top = logits.amax(-1, keepdim=True)
                logits -= top
                picked = logits.gather(-1, targets[part, None]).squeeze(-1)
                probs = logits.exp()
                total = probs.sum(-1)
                logprobs[part] = picked - total.log()
                log_z[part] = total.log() + top.squeeze(-1)
                if with_entropy:
                    entropies[part] = total.log() - probs.mul_(logits).sum(-1) / total
                if part.start == 0:
                    kept = logits.sub_(total.log().unsqueeze(-1))
        ctx.save_for_backward(hidden, weight, bias, targets, log_z, entropies, kept)
        ctx.temperature, ctx.chunk_size = temperature, chunk_size
        ctx.set_materialize_grads(False)
        if not entropy_grad:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, log_z, entropies, kept = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if ctx.needs_input_grad[0] else None
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        grad_bias = torch.empty_like(bias) if ctx.needs_input_grad[2] else None
        columns = max(1, ctx.chunk_size // max(1, len(hidden)))
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(weight), columns):
                part = slice(start, start + columns)
                again = hidden[len(kept) :]
                scores = _scaled_logits(again, weight[part], None if bias is None else bias[part], ctx.temperature)
                scores = torch.cat([kept[:, part], scores.sub_(log_z[len(kept) :].unsqueeze(-1))])
                grad = _grad_of_logits(scores, targets - start, entropies, *grads).div_(ctx.temperature)
                if grad_bias is not None:
                    grad_bias[part] = grad.sum(0)
                grad = grad.to(hidden.dtype)
                if grad_hidden is not None:
                    grad_hidden += grad @ weight[part]
                if grad_weight is not None:
                    grad_weight[part] = grad.T @ hidden
        grad_hidden = None if grad_hidden is None else grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None


def _grad_of_logits(
    scores: Tensor, targets: Tensor, entropies: Tensor, grad_logprobs: Tensor | None, grad_entropies: Tensor | None
) -> Tensor:
    """Return the gradient for one vocabulary chunk's scaled logits, given its log-probabilities; overwrites them.

    d logprob / d logit_v = [v is the target] - p_v;  d entropy / d logit_v = -p_v (log p_v + entropy).

    Args:
        scores: float32 [N, c], log-probabilities of the chunk's tokens.
        targets: int64 [N], counted from the chunk's first token; outside 0..c-1 where the target is in another chunk.
        entropies: float32 [N].
        grad_logprobs: float32 [N], or None for zero.
        grad_entropies: float32 [N], or None for zero.

    Returns:
        float32 [N, c].
    """
    inner = torch.zeros_like(entropies) if grad_logprobs is None else grad_logprobs
    weights = inner.neg().unsqueeze(-1)
    if grad_entropies is not None:
        weights = weights - grad_entropies.unsqueeze(-1) * (scores + entropies.unsqueeze(-1))
    grad = scores.exp_().mul_(weights)
    here = (targets >= 0) & (targets < scores.shape[1])
    # Adding 0 where the target is elsewhere needs no boolean index, hence no wait for the device.
    return grad.scatter_add_(
        1, targets.clamp(0, scores.shape[1] - 1).unsqueeze(-1), torch.where(here, inner, 0.0).unsqueeze(-1)
    )
