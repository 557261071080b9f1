"""Callbacks that watch a run, and save it."""

from lightrl.callbacks.adaptive_kl import AdaptiveKL
from lightrl.callbacks.kl_monitor import KLMonitor
from lightrl.callbacks.rollout_checkpoint import RolloutCheckpoint
from lightrl.callbacks.rollout_evaluation import RolloutEvaluation
from lightrl.callbacks.rollout_logger import RolloutLogger
from lightrl.callbacks.run_report import RunReport
from lightrl.callbacks.sample_table import SampleTable
from lightrl.callbacks.staleness_monitor import StalenessMonitor
from lightrl.callbacks.throughput_monitor import ThroughputMonitor

__all__ = [
    "AdaptiveKL",
    "KLMonitor",
    "RolloutCheckpoint",
    "RolloutEvaluation",
    "RolloutLogger",
    "RunReport",
    "SampleTable",
    "StalenessMonitor",
    "ThroughputMonitor",
]
