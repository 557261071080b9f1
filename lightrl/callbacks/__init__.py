"""Callbacks that watch a run."""

from lightrl.callbacks.sample_table import SampleTable

__all__ = ["SampleTable"]
