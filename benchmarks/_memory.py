"""Memory of this process, and of its device whoever uses it, in GiB."""

import threading
import time
from typing import Any

SECONDS = 0.1  # between two looks for the peak


class Memory:
    """Looks at ``device``, where that is a GPU, all the time: for the most that is used of it."""

    def __init__(self, device: Any) -> None:
        self._device, self._most = device, 0.0
        self._on_gpu = device.type == "cuda"
        if self._on_gpu:
            threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        import torch

        torch.cuda.set_device(self._device)  # a thread's own: or this one would open another device
        while True:
            self._most = max(self._most, used())
            time.sleep(SECONDS)

    def now(self) -> dict[str, float]:
        """Return what is held, open files, and peaks: torch's own (``peak``) and the device's (``device_peak``)."""
        import psutil

        process = psutil.Process()
        found = {"host": process.memory_info().rss / 2**30, "files": float(process.num_fds())}
        return found | (on_device() | {"device_peak": self._most} if self._on_gpu else {"peak": 0.0})


def on_device() -> dict[str, float]:
    import torch

    counts = {
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "peak": torch.cuda.max_memory_allocated(),
    }
    return {name: count / 2**30 for name, count in counts.items()} | {"device": used()}


def used() -> float:
    """What all processes use of the current device."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30
