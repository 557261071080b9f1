"""Where a trainer lays weights down for its engines."""

from __future__ import annotations

from typing import Literal, get_args

import torch

from lightrl.engines.staging import Shelf, Shipment
from lightrl.pools.pool import EnginePool
from lightrl.weights.source import Weights

Transport = Literal["cuda_ipc", "wire"]


class Outbox:
    """Packs shipments, for ``"cuda_ipc"`` into one buffer that engines on this host read where it lies.

    Args:
        transport: see :class:`lightrl.strategies.AsyncVLLMStrategy`.
        device: of the trainer.
        pool: who starts the engines.

    Raises:
        ValueError: the trainer is on no GPU and ``transport`` needs one.
    """

    def __init__(self, transport: Transport | None, device: torch.device, pool: str | list[str]) -> None:
        on_gpu = device.type == "cuda"
        self.transport = transport or ("cuda_ipc" if on_gpu and pool == "local" else "wire")
        if self.transport == "cuda_ipc" and not on_gpu:
            raise ValueError("transport='cuda_ipc' is for trainers on a GPU: use transport='wire'")
        self._device = device
        self._shelf: Shelf | None = None

    def open(self, pool: EnginePool) -> None:
        """Wait until ``pool`` stands and what lies here may be written to; :meth:`pack` comes next."""
        if self.transport == "cuda_ipc":
            pool.hold()

    def pack(self, weights: Weights, version: int, recompute_kv: bool) -> Shipment:
        """Return weights ready to be pushed, next."""
        if self.transport == "wire":
            return Shipment(weights, version, recompute_kv)
        if self._shelf is None:
            self._shelf = Shelf(weights, self._device)
        return Shipment(weights, version, recompute_kv, self._shelf)


def check_transport(transport: str | None) -> None:
    """Raise ValueError where there is no such transport."""
    if transport is not None and transport not in get_args(Transport):
        raise ValueError(f"transport={transport!r} is neither 'cuda_ipc' nor 'wire'")
