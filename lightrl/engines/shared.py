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
