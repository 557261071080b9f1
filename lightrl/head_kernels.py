"""Triton kernels that read each logit of a policy's head once: a GPU's half of :mod:`lightrl.fused_logprobs`.

Triton comes with torch where there is an NVIDIA GPU, so this module is imported where the first logits lie on one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROW_BLOCK, _ROW_WARPS = 4096, 8
_BLOCK, _WARPS = 2048, 4


def statistics(logits: Tensor, bias: Tensor | None, targets: Tensor, temperature: float) -> Tensor:
    """See :func:`lightrl.fused_logprobs.statistics`."""
    found = logits.new_empty((3, len(logits)), dtype=torch.float32)
    if len(logits):
        _statistics[(len(logits),)](
            logits,
            logits if bias is None else bias,
            targets,
            found,
            found.stride(0),
            logits.stride(0),
            logits.shape[1],
            1 / temperature,
            HAS_BIAS=bias is not None,
            BLOCK=_ROW_BLOCK,
            num_warps=_ROW_WARPS,
        )
    return found


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
    """See :func:`lightrl.fused_logprobs.gradient`; written over ``logits``."""
    if logits.numel():
        _gradient[(len(logits), triton.cdiv(logits.shape[1], _BLOCK))](
            logits,
            logits if bias is None else bias,
            targets,
            log_z,
            entropies,
            grad_logprobs.contiguous(),
            log_z if grad_entropies is None else grad_entropies.contiguous(),
            logits.stride(0),
            logits.shape[1],
            1 / temperature,
            HAS_BIAS=bias is not None,
            HAS_ENTROPY=grad_entropies is not None,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
        )
    return logits


@triton.jit  # type: ignore[untyped-decorator]
def _scores(logits, bias, inside, factor, HAS_BIAS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Logits as they were sampled from, in float32; -inf outside."""
    x = tl.load(logits, mask=inside, other=-float("inf")).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias, mask=inside, other=0.0).to(tl.float32)
    return x * factor


@triton.jit  # type: ignore[untyped-decorator]
def _statistics(  # type: ignore[no-untyped-def]
    logits,
    bias,
    targets,
    found,
    found_stride,
    stride,
    width,
    factor,
    HAS_BIAS: tl.constexpr,  # noqa: N803 (Triton's way to write constants)
    BLOCK: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0)
    row_logits = logits + row.to(tl.int64) * stride
    top = -float("inf")
    total = 0.0  # sum of exp(score - top) so far
    weighted = 0.0  # sum of exp(score - top) * (score - top)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < width
        x = _scores(row_logits + at, bias + at, inside, factor, HAS_BIAS)
        new = tl.maximum(top, tl.max(x, 0))
        shift = tl.where(new == -float("inf"), 0.0, new)
        kept = tl.exp(top - shift)
        e = tl.exp(x - shift)
        lower = tl.where(total == 0.0, 0.0, total * (top - shift))  # 0 * -inf would be NaN
        weighted = (weighted + lower) * kept + tl.sum(tl.where(e == 0.0, 0.0, e * (x - shift)), 0)
        total = total * kept + tl.sum(e, 0)
        top = new
    target = tl.load(targets + row)
    picked = _scores(row_logits + target, bias + target, True, factor, HAS_BIAS)
    tl.store(found + row, picked - top - tl.log(total))
    tl.store(found + found_stride + row, top + tl.log(total))
    tl.store(found + 2 * found_stride + row, tl.log(total) - weighted / total)


@triton.jit  # type: ignore[untyped-decorator]
def _gradient(  # type: ignore[no-untyped-def]
    logits,
    bias,
    targets,
    log_z,
    entropies,
    grad_logprobs,
    grad_entropies,
    stride,
    width,
    factor,
    HAS_BIAS: tl.constexpr,  # noqa: N803
    HAS_ENTROPY: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    place = logits + row.to(tl.int64) * stride + at
    logprob = _scores(place, bias + at, inside, factor, HAS_BIAS) - tl.load(log_z + row)
    p = tl.exp(logprob)
    upstream = tl.load(grad_logprobs + row)
    through = p * upstream
    if HAS_ENTROPY:
        spread = tl.load(grad_entropies + row) * (logprob + tl.load(entropies + row))
        through += tl.where(p == 0.0, 0.0, p * spread)
    grad = tl.where(at == tl.load(targets + row), upstream, 0.0) - through
    tl.store(place, (grad * factor).to(logits.dtype.element_ty), mask=inside)
