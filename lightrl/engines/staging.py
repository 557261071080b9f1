"""Weights between trainer and engine, as the bytes of all tensors in one buffer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightrl.buffers import spans
from lightrl.engines.messages import CHUNK_BYTES, Chunk, Push, SharedMemory, TensorMeta, encode
from lightrl.engines.shared import Mirror, SharedBuffer
from lightrl.weights.source import HeldWeights, Weights


def num_bytes(metas: list[TensorMeta]) -> int:
    """Return the size of a buffer for these tensors.

    Raises:
        ValueError: one has no dtype or shape that weights can have.
    """
    return spans(map(_size, metas))[-1].stop if metas else 0


def views(buffer: Tensor, metas: list[TensorMeta]) -> list[tuple[str, Tensor]]:
    """Return (checkpoint name, tensor) pairs that lie in a buffer of :func:`num_bytes` bytes."""
    places = zip(metas, spans(map(_size, metas)), strict=True)
    return [(meta.name, buffer[span].view(_dtype(meta)).view(meta.shape)) for meta, span in places]


def metas_of(weights: Weights) -> list[TensorMeta]:
    """Return what has to be said of weights before they come."""
    return [TensorMeta(n, str(t.dtype).removeprefix("torch."), list(t.shape)) for n, t in weights.outline()]


class Staging:
    """Where the pieces of a push arrive, beside the weights that still generate.

    Args:
        push: what will come.
        device: where to; the engine's own, so that what is left to do at the end is quick.

    Raises:
        ValueError: a tensor has no dtype or shape that weights can have, or there is no room for all of them.
    """

    def __init__(self, push: Push, device: torch.device | str = "cpu") -> None:
        self.push = push
        size = num_bytes(push.tensors)
        if not size:
            raise ValueError("there is nothing in it")
        try:
            self._buffer = torch.empty(size, dtype=torch.uint8, device=device)
        except (RuntimeError, TypeError) as error:  # the latter beyond 64 bits
            raise ValueError(f"no room for its {size} bytes ({error})") from error
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

    def weights(self) -> HeldWeights:
        """Return what came."""
        return HeldWeights(views(self._buffer, self.push.tensors), stay=False)


class SharedReader:
    """Finds the weights of a push in memory of the trainer, which stays open: the next push lies in the same place."""

    def __init__(self) -> None:
        self._place: tuple[SharedMemory, list[TensorMeta]] | None = None
        self._mirror: Mirror | None = None
        self._weights = HeldWeights([])

    def weights(self, push: Push) -> HeldWeights:
        """Return the weights.

        Raises:
            ValueError: the memory cannot be opened from here.
        """
        assert push.shared is not None
        if self._mirror is None or self._place != (push.shared, push.tensors):
            self._mirror = Mirror(push.shared)
            self._weights = HeldWeights(views(self._mirror.tensor, push.tensors))
            self._place = push.shared, push.tensors
        self._mirror.refresh()
        return self._weights


class Shelf:
    """GPU memory that weights are laid down in again and again, for engines that read them where they lie.

    Args:
        weights: the first of them; later ones have the same names and shapes.
        device: whose memory.
    """

    def __init__(self, weights: Weights, device: torch.device) -> None:
        self.metas = metas_of(weights)
        self._buffer = SharedBuffer(num_bytes(self.metas), device)
        self.memory = self._buffer.memory
        self._places = dict(views(self._buffer.tensor, self.metas))
        self._held: list[tuple[str, Tensor]] | None = None
        self._copies: tuple[list[Tensor], list[Tensor]] = [], []

    @torch.no_grad()
    def lay(self, weights: Weights) -> None:
        """Lay weights down; all are there when this returns."""
        held = weights.held()
        if held is not None and held is not self._held:
            self._held, self._copies = held, ([self._places[name] for name, _ in held], [t for _, t in held])
        if held is None:
            _pack(weights, None, self._places)
        else:
            torch._foreach_copy_(*self._copies)
        torch.cuda.synchronize(self._buffer.tensor.device)  # engines do not wait for this process's stream


class Shipment:
    """All weights of one version in one buffer, ready to be sent to any number of engines.

    Args:
        weights: they are copied.
        version: optimizer steps done by them.
        recompute_kv: see :class:`~lightrl.engines.messages.Push`.
        shelf: where they are laid down for engines that can open it; None: bytes on the host.
    """

    def __init__(self, weights: Weights, version: int, recompute_kv: bool, shelf: Shelf | None = None) -> None:
        if shelf is not None:
            shelf.lay(weights)
            self.push = Push(version, shelf.metas, recompute_kv, shelf.memory)
            return
        metas = metas_of(weights)
        held = weights.held()
        first = held[0][1].device if held else torch.device("cpu")
        buffer = torch.empty(num_bytes(metas), dtype=torch.uint8, device=first)
        _pack(weights, held, dict(views(buffer, metas)))
        self._buffer = buffer.cpu()
        self.push = Push(version, metas, recompute_kv)

    def frames(self) -> Iterator[list[Any]]:
        """Yield the multipart messages of the push, in order."""
        yield [encode(self.push)]
        if self.push.shared is None:
            for offset in range(0, len(self._buffer), CHUNK_BYTES):
                yield [encode(Chunk(offset)), self._buffer[offset : offset + CHUNK_BYTES].numpy()]


@torch.no_grad()
def _pack(weights: Weights, held: list[tuple[str, Tensor]] | None, places: dict[str, Tensor]) -> None:
    if held is not None:
        torch._foreach_copy_([places[name] for name, _ in held], [tensor for _, tensor in held])
        return
    for name, tensor in weights:
        places[name].copy_(tensor)


def _dtype(meta: TensorMeta) -> torch.dtype:
    dtype = getattr(torch, meta.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"tensor {meta.name!r} has dtype {meta.dtype!r}, which torch does not know")
    return dtype


def _size(meta: TensorMeta) -> int:
    if any(size < 0 for size in meta.shape):
        raise ValueError(f"tensor {meta.name!r} has shape {meta.shape}")
    return math.prod(meta.shape) * _dtype(meta).itemsize
