"""Weights on arrival, piece by piece, beside the ones that still generate."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightrl.engines.messages import CHUNK_BYTES, Chunk, Push, TensorMeta, encode


class Staging:
    """One buffer for all tensors of a push, end to end.

    Args:
        push: what will come.

    Raises:
        ValueError: a tensor has no dtype or shape that weights can have, or there is no room for all of them.
    """

    def __init__(self, push: Push) -> None:
        self.push = push
        self._sizes = [_num_bytes(meta) for meta in push.tensors]
        if not sum(self._sizes):
            raise ValueError("there is nothing in it")
        try:
            self._buffer = torch.empty(sum(self._sizes), dtype=torch.uint8)
        except (RuntimeError, TypeError) as error:  # the latter beyond 64 bits
            raise ValueError(f"no room for its {sum(self._sizes)} bytes ({error})") from error
        self._received = 0

    @property
    def complete(self) -> bool:
        """Whether every byte is there."""
        return self._received == len(self._buffer)

    def add(self, offset: int, data: Any) -> None:
        """Take a piece; they come in order.

        Raises:
            ValueError: this is not the next piece, or it is longer than what is missing.
        """
        size = len(data)
        if offset != self._received or offset + size > len(self._buffer) or not size:
            raise ValueError(
                f"a piece of {size} bytes at {offset} of a push of {len(self._buffer)} bytes, of which "
                f"{self._received} are there"
            )
        self._buffer[offset : offset + size] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._received += size

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (checkpoint name, tensor)."""
        for meta, data in zip(self.push.tensors, self._buffer.split(self._sizes), strict=True):
            # A copy: a view into the buffer need not be aligned for its dtype.
            yield meta.name, data.clone().view(_dtype(meta)).view(meta.shape)


class Shipment:
    """All weights of one version as bytes, ready to be sent to any number of engines.

    Args:
        weights: (checkpoint name, full tensor) pairs; they are copied.
        version: optimizer steps done by them.
        recompute_kv: see :class:`~lightrl.engines.messages.Push`.
    """

    def __init__(self, weights: Iterator[tuple[str, Tensor]], version: int, recompute_kv: bool) -> None:
        metas, parts = [], []
        for name, tensor in weights:
            metas.append(TensorMeta(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)))
            parts.append(tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu())
        self.push = Push(version, metas, recompute_kv)
        self._buffer = torch.cat(parts)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return len(self._buffer)

    def frames(self) -> Iterator[list[Any]]:
        """Yield the multipart messages of the push, in order."""
        yield [encode(self.push)]
        for offset in range(0, len(self._buffer), CHUNK_BYTES):
            yield [encode(Chunk(offset)), self._buffer[offset : offset + CHUNK_BYTES].numpy()]


def _dtype(meta: TensorMeta) -> torch.dtype:
    dtype = getattr(torch, meta.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"tensor {meta.name!r} has dtype {meta.dtype!r}, which torch does not know")
    return dtype


def _num_bytes(meta: TensorMeta) -> int:
    if any(size < 0 for size in meta.shape):
        raise ValueError(f"tensor {meta.name!r} has shape {meta.shape}")
    return math.prod(meta.shape) * _dtype(meta).itemsize
