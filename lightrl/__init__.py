"""lightrl: reinforcement learning of language models, the way Lightning users already work.

Importing it registers the strategies ``"colocated_vllm"`` and ``"colocated_hf"``.
"""

from lightning.pytorch import Trainer

from lightrl import algorithms as algorithms
from lightrl import strategies as strategies
from lightrl.datamodule import RolloutDataModule
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
    "Sampling",
    "Trainer",
]
