"""Callbacks that watch a run, and save it."""

from lightrl.callbacks.rollout_checkpoint import RolloutCheckpoint
from lightrl.callbacks.sample_table import SampleTable

__all__ = ["RolloutCheckpoint", "SampleTable"]
