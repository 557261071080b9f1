"""Where the sequences of a packed row lie, as attention wants to know it."""

from __future__ import annotations

import inspect
import itertools
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

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


class Spans(NamedTuple):
    """Where queries and keys of each piece lie, on the device."""

    cu_queries: Tensor
    """int32 [pieces + 1]."""
    longest_query: int
    key_index: Tensor | None
    """int64: the keys, end to end; None: the row as it lies."""
    cu_keys: Tensor
    longest_key: int
    told: bool
    """The kernel has to be told that there are fewer key heads."""


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

    @cached_property
    def spans(self) -> Spans | None:
        """What torch's variable-length kernel wants to know, or None where there is no such kernel."""
        if self.device.type != "cuda":
            return None
        index, cu_keys, longest = self.keys
        # Rounded up, which only makes the kernel's grid larger: or compiled layers would meet ever new numbers.
        longest_query, longest_key = (1 << (n - 1).bit_length() for n in (self.max_length, longest))
        return Spans(self.cu_seqlens, longest_query, index, cu_keys, longest_key, _wants_to_be_told())

    def _cumulative(self, lengths: list[int]) -> Tensor:
        return self._there(F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32))

    def _there(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)  # else the host would wait for all that the device has to do

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
        return self._there(index), self._cumulative(lengths), max(lengths)

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
                    self._blocks.append(Block(self._there(index), self._there(real), self._span(prefix)))
            self._inverse = self._there(torch.cat(flat).argsort())
        return self._blocks, self._inverse


def _like_lengths(lengths: list[int]) -> list[list[int]]:
    blocks: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if blocks and lengths[i] <= max(_ROW_SLACK * lengths[blocks[-1][0]], 16):
            blocks[-1].append(i)
        else:
            blocks.append([i])
    return blocks


@cache
def _wants_to_be_told() -> bool:
    """Whether torch's kernel takes fewer key heads only where it is told; older ones took them anyway."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters
