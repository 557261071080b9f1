"""lightrl: reinforcement learning of language models, the way Lightning users already work.

Importing it registers the strategies ``"colocated_vllm"``, ``"colocated_hf"`` and ``"async_vllm"``.
"""

from importlib import import_module
from typing import Any

from lightning.pytorch import Trainer

from lightrl import algorithms as algorithms
from lightrl import strategies as strategies
from lightrl.advantages import compute_advantages
from lightrl.datamodule import RolloutDataModule
from lightrl.logprobs import get_logprobs
from lightrl.losses import clipped_policy_loss
from lightrl.module import RLModule
from lightrl.types import Completion, Prompt, Rollout, RolloutBatch, RolloutGroup, Sampling

__version__ = "0.1.0"

__all__ = [
    "Completion",
    "Prompt",
    "RLModule",
    "Rollout",
    "RolloutBatch",
    "RolloutDataModule",
    "RolloutGroup",
    "RolloutServer",
    "Sampling",
    "TrainWorker",
    "Trainer",
    "WeightManager",
    "clipped_policy_loss",
    "compute_advantages",
    "get_logprobs",
    "parse_vllm_outputs",
]

_LATER = {
    "RolloutServer": "lightrl.rollout_server",
    "TrainWorker": "lightrl.train_worker",
    "WeightManager": "lightrl.weight_manager",
    "parse_vllm_outputs": "lightrl.outputs",
}
"""Modules that are imported when their name is first asked for."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'lightrl' has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)
