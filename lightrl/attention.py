"""Attention over packed sequences, registered with transformers, for any model that uses its attention interface.

Tokens of all sequences lie end to end in one row, so that no layer computes padding. On a GPU the attention is torch's
variable-length kernel; elsewhere the sequences are laid out as padded rows of like length for the attention alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "lightrl_packed"
_ROW_SLACK = 1.3  # rows up to this much longer share a block: few blocks, little padding


class SequenceLayout:
    """Where the sequences of a packed row begin and end.

    Args:
        lengths: S sequence lengths in tokens; their sum is T.
        device: where the index tensors live.
    """

    def __init__(self, lengths: list[int], device: torch.device | str = "cpu") -> None:
        self.lengths = lengths
        self.max_length = max(lengths)
        sizes = torch.tensor(lengths)
        self.cu_seqlens = F.pad(sizes.cumsum(0), (1, 0)).to(device, torch.int32)
        self._blocks: list[tuple[Tensor, Tensor]] | None = None
        self._inverse: Tensor | None = None

    def blocks(self) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
        """Return blocks of like length, as (token index [B, L], mask of real tokens [B, L]), and the way back.

        The way back is an index [T] into the real tokens of all blocks end to end. Padding points at the last token of
        its own sequence: a causal row never looks at what comes after it.
        """
        if self._blocks is None or self._inverse is None:
            device = self.cu_seqlens.device
            starts = self.cu_seqlens[:-1].long().cpu()
            sizes = torch.tensor(self.lengths)
            self._blocks, flat = [], []
            for members in _like_lengths(self.lengths):
                size = sizes[members][:, None]
                column = torch.arange(int(size.max()))
                index = starts[members][:, None] + torch.minimum(column, size - 1)
                real = column < size
                flat.append(index[real])
                self._blocks.append((index.to(device), real.to(device)))
            self._inverse = torch.cat(flat).argsort().to(device)
        return self._blocks, self._inverse


def _like_lengths(lengths: list[int]) -> list[list[int]]:
    blocks: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if blocks and lengths[i] <= max(_ROW_SLACK * lengths[blocks[-1][0]], 16):
            blocks[-1].append(i)
        else:
            blocks.append([i])
    return blocks


def _band(length: int, window: int, device: torch.device) -> Tensor:
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return (distance >= 0) & (distance < window)


def _padded_attention(q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, scale: float, window: int) -> Tensor:
    blocks, inverse = layout.blocks()
    outputs = []
    for index, real in blocks:
        rows = [x[index].transpose(1, 2) for x in (q, k, v)]
        length = index.shape[1]
        mask = _band(length, window, q.device) if 0 < window < length else None
        out = F.scaled_dot_product_attention(
            rows[0], rows[1], rows[2], attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
        outputs.append(out.transpose(1, 2)[real])
    return torch.cat(outputs)[inverse]


def _varlen_attention(q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, scale: float, window: int) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    cu, longest = layout.cu_seqlens, layout.max_length
    left = window - 1 if window > 0 else -1
    # Older torch takes fewer key heads without being told.
    told = "enable_gqa" in inspect.signature(varlen_attn).parameters and q.shape[1] != k.shape[1]
    gqa: dict[str, Any] = {"enable_gqa": True} if told else {}
    out: Any = varlen_attn(q, k, v.contiguous(), cu, cu, longest, longest, scale=scale, window_size=(left, 0), **gqa)
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
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each sequence of a packed row: transformers' attention interface.

    Args:
        module: the attention layer.
        query: [1, heads, T, head size].
        key: [1, key heads, T, head size].
        value: like ``key``.
        attention_mask: unused: ``layout`` says all.
        layout: borders of the sequences.
        scaling: factor on the scores; None: 1 / sqrt(head size).
        sliding_window: look at most this many tokens back, the token itself included.
        softcap: refused.
        s_aux: refused.

    Returns:
        [1, T, heads, head size] and None (no attention weights).

    Raises:
        ValueError: the layer soft-caps its scores or has attention sinks, which the kernels here cannot do.
    """
    if softcap is not None or s_aux is not None:
        raise ValueError("packed attention has no soft-capping or sinks; set RLModule(..., packed=False)")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    fast = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)
    attend = _varlen_attention if fast else _padded_attention
    return attend(q, k, v, layout, scale, sliding_window or 0)[None], None


@contextmanager
def packed_rows(model: PreTrainedModel) -> Iterator[None]:
    """Inside the block ``model`` takes packed rows: its forward wants ``layout=`` and ``position_ids=``."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)
    before = model.config._attn_implementation
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
    return bool(model._supports_attention_backend) and plain and kinds <= {"full_attention", "sliding_attention"}
