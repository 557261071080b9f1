"""Optimizer state in host memory while somebody else has the device's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from lightrl.buffers import aligned, spans
from lightrl.sharding import shard, with_shard

_PIECE_BYTES = 2**30
"""Of host memory that is taken at once: torch rounds page-locked memory up to a power of two."""


class StateOffload:
    """Moves what has dimensions of optimizers' state out and back, in place.

    The host memory is page-locked where it can be, several times as fast to copy to, and is kept for the next time: to
    have it handed out takes longer than the copies. State of optimizers that place their own is left alone.
    """

    def __init__(self) -> None:
        self._host: list[Tensor] = []
        self.is_out = False
        """Whether the state is on the host."""

    def out(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Move the state to the host; the device's memory is free when this returns."""
        places = list(_places(optimizers))
        shards = [shard(state[key]) for state, key in places]
        if [(h.shape, h.dtype) for h in self._host] != [(s.shape, s.dtype) for s in shards]:
            self._host = []  # before there is more
            self._host = [h for piece in _pieces(shards) for h in _host_memory(piece)]
        if shards:
            torch._foreach_copy_(self._host, shards, non_blocking=True)
        for (state, key), host in zip(places, self._host, strict=True):
            state[key] = with_shard(state[key], host)
        if any(s.is_cuda for s in shards):
            torch.cuda.synchronize()
        self.is_out = True

    def back(self, optimizers: Iterable[torch.optim.Optimizer], device: torch.device) -> None:
        """Move the state to ``device``, for all that follows on the current stream."""
        for state, key in _places(optimizers):
            state[key] = with_shard(state[key], shard(state[key]).to(device, non_blocking=True, copy=True))
        self.is_out = False


def _places(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[tuple[dict[str, Any], str]]:
    for optimizer in optimizers:
        if getattr(optimizer, "places_own_state", False):
            continue
        for state in optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.ndim:
                    yield state, key


def _pieces(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    piece: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if piece and size + tensor.nbytes > _PIECE_BYTES:
            yield piece
            piece, size = [], 0
        piece.append(tensor)
        size += aligned(tensor.nbytes)
    if piece:
        yield piece


def _host_memory(tensors: list[Tensor]) -> list[Tensor]:
    """Return tensors like these on the host, of one piece of memory."""
    places = spans(t.nbytes for t in tensors)
    try:
        memory = torch.empty(places[-1].stop, dtype=torch.uint8, pin_memory=tensors[0].is_cuda)
    except RuntimeError:  # the system hands out no more of it that is page-locked
        memory = torch.empty(places[-1].stop, dtype=torch.uint8)
    return [memory[place].view(t.dtype).view(t.shape) for place, t in zip(places, tensors, strict=True)]
