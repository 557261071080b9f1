"""Collectives that are no-ops on one process, on whatever device the process group speaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_lone = False


def world_size() -> int:
    """Number of processes; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank() if world_size() > 1 else 0


def group_is_up() -> bool:
    """Whether there is a default process group that was not made here for an engine's sake."""
    return dist.is_available() and dist.is_initialized() and not _lone


def make_lone_group(device_type: str) -> None:
    """Make a default process group of this process alone where there is none: a library would make one on a port."""
    global _lone
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    _lone = True


def drop_lone_group() -> None:
    """End the group that :func:`make_lone_group` made, if it is still there."""
    global _lone
    if _lone and dist.is_initialized():
        dist.destroy_process_group()
    _lone = False


def all_sum(values: Tensor) -> Tensor:
    """Sum ``values`` (any shape) over all ranks; returned on the device it came from."""
    return _reduced(values, dist.ReduceOp.SUM)


def all_max(values: Tensor) -> Tensor:
    """Largest of ``values`` (any shape) over all ranks, entry by entry; returned on the device it came from."""
    return _reduced(values, dist.ReduceOp.MAX)


def _reduced(values: Tensor, op: Any) -> Tensor:
    if world_size() == 1:
        return values
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    moved = values.to(device, copy=True)
    dist.all_reduce(moved, op)
    return moved.to(values.device)


def all_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Gather one picklable object from every rank of ``group``, in rank order."""
    if world_size() == 1:
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def from_rank_zero(work: Callable[[], Any]) -> Any:
    """Return what ``work`` returns on rank 0, on every rank; what it raises there is raised everywhere.

    Raises:
        RuntimeError: on the other ranks, naming the error of rank 0.
    """
    if world_size() == 1:
        return work()
    error: BaseException | None = None
    result = None
    if rank() == 0:
        try:
            result = work()
        except Exception as raised:
            error = raised
    result, reason = all_objects((result, None if error is None else f"{type(error).__name__}: {error}"))[0]
    if error is not None:
        raise error
    if reason is not None:
        raise RuntimeError(f"rank 0 failed with {reason}")
    return result
