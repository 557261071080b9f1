"""What vLLM's own worker processes can do for us: the engine adds these methods to them by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightrl.engines import messages
from lightrl.engines.base import WeightSyncError
from lightrl.engines.loader import Loader
from lightrl.engines.staging import SharedReader
from lightrl.weights.source import Weights


class WeightLoader:
    """Mixed into vLLM's worker class."""

    def lightrl_load(self: Any, path: str) -> str | None:
        """Load all weights from a safetensors file; return what went wrong."""
        return _load(self, _FileWeights(path, self.device))

    def lightrl_load_shared(self: Any, push: bytes) -> str | None:
        """Load the weights of a push from memory that it names; return what went wrong."""
        message = messages.from_trainer(push)
        assert isinstance(message, messages.Push)
        if not hasattr(self, "lightrl_reader"):
            self.lightrl_reader = SharedReader()
        return _load(self, self.lightrl_reader.weights(message))


def _load(worker: Any, weights: Weights) -> str | None:
    if not hasattr(worker, "lightrl_loader"):
        model = worker.model_runner.get_model()
        worker.lightrl_loader = Loader(model, worker.rank, lambda pairs: worker.reload_weights(weights_iterator=pairs))
    try:
        worker.lightrl_loader.load(weights)
    except WeightSyncError as error:
        return str(error)
    return None


class _FileWeights:
    """:class:`Weights` of a safetensors file, read one by one."""

    def __init__(self, path: str, device: torch.device) -> None:
        self._path, self._device = path, device

    def outline(self) -> list[tuple[str, Tensor]]:
        with self._open("cpu") as file:  # a file in memory: nothing is copied to look at it
            return [(name, file.get_tensor(name).to("meta")) for name in file.keys()]  # noqa: SIM118 (no mapping)

    def held(self) -> None:
        return None

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        with self._open(str(self._device)) as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                yield name, file.get_tensor(name)

    def _open(self, device: str) -> Any:
        from safetensors import safe_open

        return safe_open(self._path, framework="pt", device=device)
