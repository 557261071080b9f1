"""Attention over packed sequences, registered with transformers, for any model that uses its attention interface.

Tokens of all sequences lie end to end in one row, so that no layer computes padding. On a GPU the attention is torch's
variable-length kernel; elsewhere the sequences are laid out as padded rows of like length for the attention alone.
A prefix that several sequences share lies in the row once: each of them looks at its keys and values and at its own.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "lightrl_packed"
_ROW_SLACK = 1.3  # rows up to this much longer share a block: few blocks, little padding


@dataclass(frozen=True, slots=True)
class Block:
    """B pieces of like length that continue the same prefix, or none."""

    index: Tensor
    """int64 [B, L]: tokens. Padding repeats the piece's last: a causal row never looks at what comes after it."""
    real: Tensor
    """bool [B, L]: False where padded."""
    prefix: slice
    """Tokens before the pieces, empty where they begin their sequence."""


class SequenceLayout:
    """Where the pieces of a packed row begin and end, and which continue which.

    Args:
        lengths: pieces' lengths in tokens; their sum is T.
        device: where the index tensors live.
        prefixes: for each piece, the earlier piece that it continues, or -1; None: each is a sequence of its own. What
            is continued continues nothing itself.
    """

    def __init__(
        self, lengths: list[int], device: torch.device | str = "cpu", prefixes: list[int] | None = None
    ) -> None:
        self.lengths = lengths
        self.prefixes = [-1] * len(lengths) if prefixes is None else prefixes
        self.device = torch.device(device)
        self.max_length = max(lengths)
        self.cu_seqlens = self._cumulative(lengths)
        self._starts = [0, *itertools.accumulate(lengths)]
        self._blocks: list[Block] | None = None
        self._inverse: Tensor | None = None

    def _cumulative(self, lengths: list[int]) -> Tensor:
        return F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(self.device, torch.int32)

    def _span(self, piece: int) -> slice:
        return slice(self._starts[piece], self._starts[piece + 1]) if piece >= 0 else slice(0, 0)

    @cached_property
    def keys(self) -> tuple[Tensor | None, Tensor, int]:
        """What each piece looks at, its prefix and itself, end to end: token index, cumulative lengths, the longest.

        The index is None where every piece looks at itself only: the keys are the row as it lies.
        """
        if max(self.prefixes) < 0:
            return None, self.cu_seqlens, self.max_length
        spans = [(self._span(p), self._span(i)) for i, p in enumerate(self.prefixes)]
        index = torch.cat([torch.arange(s.start, s.stop) for pair in spans for s in pair])
        lengths = [sum(s.stop - s.start for s in pair) for pair in spans]
        return index.to(self.device), self._cumulative(lengths), max(lengths)

    def blocks(self) -> tuple[list[Block], Tensor]:
        """Return pieces in blocks, and the way back: an index [T] into the real tokens of all blocks end to end."""
        if self._blocks is None or self._inverse is None:
            sizes = torch.tensor(self.lengths)
            self._blocks, flat = [], []
            for prefix in sorted(set(self.prefixes)):
                alike = [i for i, p in enumerate(self.prefixes) if p == prefix]
                for chosen in _like_lengths([self.lengths[i] for i in alike]):
                    members = [alike[i] for i in chosen]
                    size = sizes[members][:, None]
                    column = torch.arange(int(size.max()))
                    starts = torch.tensor([self._starts[i] for i in members])[:, None]
                    index, real = starts + torch.minimum(column, size - 1), column < size
                    flat.append(index[real])
                    self._blocks.append(Block(index.to(self.device), real.to(self.device), self._span(prefix)))
            self._inverse = torch.cat(flat).argsort().to(self.device)
        return self._blocks, self._inverse


def _like_lengths(lengths: list[int]) -> list[list[int]]:
    blocks: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if blocks and lengths[i] <= max(_ROW_SLACK * lengths[blocks[-1][0]], 16):
            blocks[-1].append(i)
        else:
            blocks.append([i])
    return blocks


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


@cache
def _wants_to_be_told() -> bool:
    """Whether torch's kernel takes fewer key heads only where it is told; older ones took them anyway."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _varlen_attention(q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, scale: float, window: int) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    index, cu_keys, longest = layout.keys
    if index is not None:
        k, v = k.index_select(0, index), v.index_select(0, index)
    # The kernel lines up the last query with the last key, window included (flash attention since 2.1).
    left = window - 1 if window > 0 else -1
    gqa: dict[str, Any] = {"enable_gqa": True} if q.shape[1] != k.shape[1] and _wants_to_be_told() else {}
    out: Any = varlen_attn(
        q,
        k,
        v.contiguous(),
        layout.cu_seqlens,
        cu_keys,
        layout.max_length,
        longest,
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
    fast = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)
    attend = _varlen_attention if fast else _padded_attention
    return attend(q, k, v, layout, scale, sliding_window or 0)[None], None


@cache
def _outside_graphs() -> Callable[..., Any]:
    """Return the attention, kept out of compiled graphs: with a layout in it no graph would be used twice."""
    return cast(Callable[..., Any], torch.compiler.disable(packed_attention))


@dataclass(frozen=True, slots=True)
class _HeedsLayout:
    """An attention function of transformers that leaves calls with ``layout=`` to packed attention."""

    plain: Callable[..., Any]

    def __call__(self, module: torch.nn.Module, *inputs: Any, **options: Any) -> Any:
        attend = self.plain if options.get("layout") is None else _outside_graphs()
        return attend(module, *inputs, **options)


def _make_heed_layout(name: str) -> None:
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    function = ALL_ATTENTION_FUNCTIONS[name]
    if not isinstance(function, _HeedsLayout):
        AttentionInterface.register(name, _HeedsLayout(function))


@contextmanager
def packed_rows(model: PreTrainedModel) -> Iterator[None]:
    """Inside the block ``model`` takes packed rows: its forward wants ``layout=`` and ``position_ids=``.

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
    AttentionInterface.register(NAME, _outside_graphs())
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
