"""What vLLM's own worker processes can do for us: the engine adds these methods to them by name."""

from __future__ import annotations

from typing import Any

import torch

from lightrl.engines import compat
from lightrl.engines.fingerprint import Fingerprint


class WeightLoader:
    """Mixed into vLLM's worker class."""

    def lightrl_load(self: Any, path: str) -> list[str]:
        """Load all weights from a safetensors file; return the names of those that did not arrive as they were."""
        from safetensors import safe_open

        model = self.model_runner.get_model()
        fingerprint = Fingerprint(model, self.rank)
        with safe_open(path, framework="pt", device=str(self.device)) as file, torch.no_grad():
            pairs = ((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118 (no mapping)
            self.reload_weights(weights_iterator=fingerprint.watch(pairs))
            compat.repack_tied_head(model)
            return fingerprint.mismatches()
