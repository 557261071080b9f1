"""CUDA memory that other processes on this host read where it lies, on the same GPU or over NVLink."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightrl.engines.messages import SharedMemory


class SharedBuffer:
    """Memory of this process for others to open, for as long as it lives.

    Args:
        num_bytes: how much.
        device: the GPU.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.tensor = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        """uint8 [num_bytes]."""
        storage: Any = self.tensor.untyped_storage()
        _, *words = storage._share_cuda_()
        words.append(gpu_name(device))
        self.memory = SharedMemory(*words)


def open_shared(memory: SharedMemory) -> Tensor:
    """Return another process's memory as uint8 [num_bytes].

    Raises:
        ValueError: it cannot be opened from here.
    """
    if not torch.cuda.is_available():
        raise ValueError("the trainer's GPU memory cannot be read without a GPU: use transport='wire'")
    torch.cuda.init()
    words = (memory.handle, memory.num_bytes, memory.offset, memory.counter, memory.counter_offset, memory.event)
    storage_type: Any = torch.UntypedStorage
    try:
        storage = storage_type._new_shared_cuda(torch.cuda.current_device(), *words, memory.wait)
    except (RuntimeError, ValueError, TypeError) as error:
        raise ValueError(f"the trainer's GPU memory cannot be opened here ({error}): use transport='wire'") from error
    return torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage)


def gpu_name(device: torch.device | None = None) -> str:
    """Return what all processes know a GPU by, of this process the current one."""
    return str(torch.cuda.get_device_properties(device).uuid)


class Mirror:
    """Another process's memory as it is seen from this process's GPU.

    On the same GPU it is read where it lies. From another one it is copied as a whole, which uses more of the link than
    copies of many tensors do, and does not wait for what this GPU is at.

    Args:
        memory: it stays open.

    Raises:
        ValueError: it cannot be opened from here.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self._there = self.tensor = open_shared(memory)
        self._stream: torch.cuda.Stream | None = None
        if memory.gpu == gpu_name():
            return
        try:
            self.tensor = torch.empty_like(self._there)
        except torch.OutOfMemoryError:
            return  # every tensor comes over the link by itself
        self._stream = torch.cuda.Stream()
        torch.cuda.synchronize()  # what had this memory before may be under way on another stream

    def refresh(self) -> None:
        """Have :attr:`tensor` hold what there is now, for all that follows on the current stream."""
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                self.tensor.copy_(self._there, non_blocking=True)
            torch.cuda.current_stream().wait_stream(self._stream)
