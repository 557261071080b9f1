"""Attention over packed sequences, registered with transformers, for any model that uses its attention interface.

Tokens of all sequences lie end to end in one row, so that no layer computes padding. On a GPU the attention is torch's
variable-length kernel; elsewhere the sequences are laid out as padded rows of like length for the attention alone.
A prefix that several sequences share lies in the row once: each of them looks at its keys and values and at its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from lightrl.layout import SequenceLayout, Spans

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "lightrl_packed"
_HALF = (torch.bfloat16, torch.float16)


def _band(queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """What each query sees, the last query being the last key."""
    distance = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)
    seen = distance >= 0
    return seen & (distance < window) if window > 0 else seen


def _padded_attention(q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, scale: float, window: int) -> Tensor:
    blocks, inverse = layout.blocks()
    outputs = []
    for block in blocks:
        shape = block.index.shape
        # index_select, because the backward of advanced indexing is several times slower.
        own = [x.index_select(0, block.index.flatten()).unflatten(0, shape).transpose(1, 2) for x in (q, k, v)]
        before = block.prefix.stop - block.prefix.start
        if before:
            prefix = [x[None, block.prefix].transpose(1, 2).expand(shape[0], -1, -1, -1) for x in (k, v)]
            own[1:] = [torch.cat(pair, dim=2) for pair in zip(prefix, own[1:], strict=True)]
        plain = not before and not 0 < window < shape[1]
        mask = None if plain else _band(shape[1], before + shape[1], window, q.device)
        out = F.scaled_dot_product_attention(
            own[0], own[1], own[2], attn_mask=mask, is_causal=plain, scale=scale, enable_gqa=True
        )
        outputs.append(out.transpose(1, 2)[block.real])
    return torch.cat(outputs).index_select(0, inverse)


def _varlen_attention(q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float, window: int) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    if spans.key_index is not None:
        k, v = k.index_select(0, spans.key_index), v.index_select(0, spans.key_index)
    # The kernel lines up the last query with the last key, window included (flash attention since 2.1).
    left = window - 1 if window > 0 else -1
    gqa: dict[str, Any] = {"enable_gqa": True} if spans.told and q.shape[1] != k.shape[1] else {}
    out: Any = varlen_attn(
        q,
        k,
        v.contiguous(),
        spans.cu_queries,
        spans.cu_keys,
        spans.longest_query,
        spans.longest_key,
        scale=scale,
        window_size=(left, 0),
        **gqa,
    )
    return cast(Tensor, out)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: SequenceLayout,
    spans: Spans | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each sequence of a packed row, shared prefix included: transformers' attention interface.

    Args:
        module: the attention layer.
        query: [1, heads, T, head size].
        key: [1, key heads, T, head size].
        value: like ``key``.
        attention_mask: None: ``layout`` says all.
        layout: borders of the sequences.
        spans: ``layout.spans``, for the kernel of a GPU.
        scaling: factor on the scores; None: 1 / sqrt(head size).
        sliding_window: look at most this many tokens back, the token itself included.
        softcap: refused.
        s_aux: refused.
        position_bias: refused.

    Returns:
        [1, T, heads, head size] and None (no attention weights).

    Raises:
        ValueError: the layer soft-caps its scores, has attention sinks or makes a mask or bias of its own, none of
            which the kernels here can do.
    """
    if any(x is not None for x in (softcap, s_aux, position_bias, attention_mask)):
        raise ValueError(
            f"packed attention has no soft-capping, sinks, biases or masks such as {type(module).__name__}'s; set "
            "RLModule(..., packed=False)"
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    window = sliding_window or 0
    if spans is not None and q.dtype in _HALF:
        return _varlen_attention(q, k, v, spans, scale, window)[None], None
    return _padded_attention(q, k, v, layout, scale, window)[None], None


@dataclass(frozen=True, slots=True)
class _Packed:
    """Packed attention that compiled layers take into their graphs where it is one kernel, and leave out elsewhere."""

    outside: Callable[..., Any]

    def __call__(self, module: torch.nn.Module, query: Tensor, *inputs: Any, **options: Any) -> Any:
        one_kernel = options.get("spans") is not None and query.dtype in _HALF
        attend = packed_attention if one_kernel else self.outside
        return attend(module, query, *inputs, **options)


@dataclass(frozen=True, slots=True)
class _HeedsLayout:
    """An attention function of transformers that leaves calls with ``layout=`` to packed attention."""

    plain: Callable[..., Any]
    packed: Callable[..., Any]

    def __call__(self, module: torch.nn.Module, *inputs: Any, **options: Any) -> Any:
        attend = self.plain if options.get("layout") is None else self.packed
        return attend(module, *inputs, **options)


@cache
def _packed() -> _Packed:
    # With a layout in it, which is no tensor, no graph would be used twice.
    return _Packed(torch.compiler.disable(packed_attention))


def _make_heed_layout(name: str) -> None:
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    function = ALL_ATTENTION_FUNCTIONS[name]
    if not isinstance(function, _HeedsLayout):
        AttentionInterface.register(name, _HeedsLayout(function, _packed()))


@contextmanager
def packed_rows(model: PreTrainedModel) -> Iterator[None]:
    """Inside the block ``model`` takes packed rows: it wants ``layout=``, ``spans=``, ``position_ids=``.

    Activation checkpointing runs layers again in the backward, when the block is left and the model has its own
    implementation back, with the ``layout`` of the forward: so that implementation is made to heed a layout as well.
    (It could not stay in place inside the block: transformers makes a T x T mask for names that it knows.) Eager
    attention is a function of each model's own and cannot be made to: such a model leaves the block with sdpa.

    Raises:
        ValueError: the model has eager attention only.
    """
    from transformers import AttentionInterface

    before = model.config._attn_implementation
    if before in (None, "eager"):
        if not model._supports_sdpa:
            raise ValueError(f"{type(model).__name__} has eager attention only: set RLModule(..., packed=False)")
        before = "sdpa"
    AttentionInterface.register(NAME, _packed())
    _make_heed_layout(before)
    model.config._attn_implementation = NAME
    try:
        yield
    finally:
        model.config._attn_implementation = before


def takes_packed_rows(model: PreTrainedModel) -> bool:
    """Whether every layer of ``model`` goes through transformers' attention interface, with plain softmax scores."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    plain = not getattr(config, "attn_logit_softcapping", None) and not hasattr(config, "swiglu_limit")
    plain = plain and not any(isinstance(m, torch.nn.Conv1d) for m in model.modules())  # mixes neighbouring tokens
    interface = model._supports_attention_backend and model._supports_sdpa
    return bool(interface) and plain and kinds <= {"full_attention", "sliding_attention"}
