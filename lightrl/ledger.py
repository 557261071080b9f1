"""Who holds a device's memory right now, for the moment when there is none left."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from lightrl.sharding import local_tensor

_GIB = 2**30


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that a device's memory is used up: torch's own error, or what a driver's says."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "out of memory" in str(error).lower()
    )


def memory_ledger(holders: Mapping[str, Iterable[Tensor | None]], device: torch.device) -> str:
    """Return a table, in GiB, of what is on ``device``: a line for each holder, and on a GPU one for all the rest.

    Args:
        holders: by name, tensors that are perhaps sharded; those of another device do not count, and no memory counts
            twice.
        device: the device.
    """
    seen: set[int] = set()
    rows = {name: _bytes(tensors, device, seen) for name, tensors in holders.items()}
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        rows["activations and all else of torch"] = allocated - sum(rows.values())
        rows["kept by torch for later"] = reserved - allocated
        rows["engine outside torch, other processes"] = total - free - reserved
        rows["free"] = free
    return "\n".join(f"  {name:40}{size / _GIB:10.3f} GiB" for name, size in rows.items())


def _bytes(tensors: Iterable[Tensor | None], device: torch.device, seen: set[int]) -> int:
    total = 0
    for tensor in tensors:
        if tensor is None:
            continue
        storage = local_tensor(tensor).untyped_storage()
        if storage.device == device and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total
