"""SIGTERM and SLURM's requeue signal, heeded between two steps.

Lightning's own handlers save, or enter collectives, wherever the signal finds the process: in the middle of a step a
checkpoint would skip that step's rollouts, and ranks that are found at different places would wait for ever.
"""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightrl.distributed import all_max

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightrl.watch import Watch

_EXIT = 128 + signal.SIGTERM


class Signals:
    """Takes the signals over from Lightning, which gives them back to whom they were when the run ends.

    Args:
        trainer: that is fitting, its handlers registered.
        grace_period: seconds after SIGTERM in which the step must end.
        watch: that ends the process after them.
    """

    def __init__(self, trainer: pl.Trainer, grace_period: float, watch: Watch) -> None:
        self.trainer, self.grace_period, self.watch = trainer, grace_period, watch
        self._terminate = self._requeue = False
        self._lightnings: Any = None
        if threading.current_thread() is not threading.main_thread():
            return
        signal.signal(signal.SIGTERM, self._on_sigterm)
        environment = trainer.strategy.cluster_environment  # type: ignore[attr-defined]
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
            assert environment.requeue_signal is not None
            self._lightnings = signal.getsignal(environment.requeue_signal)
            signal.signal(environment.requeue_signal, self._on_requeue)

    def _on_sigterm(self, signum: int, frame: Any) -> None:
        if self._terminate:
            return
        self._terminate = True
        self.watch.end_within(
            self.grace_period,
            f"did not come to the end of its step within grace_period={self.grace_period:g} s of SIGTERM: resume from "
            "the last checkpoint",
        )
        launcher: Any = self.trainer.strategy.launcher
        if launcher is not None:
            launcher.kill(signum)

    def _on_requeue(self, signum: int, frame: Any) -> None:
        self._requeue = True

    def step_ended(self) -> None:
        """Save and requeue, or save and end, if any rank was told to (a collective).

        Raises:
            SIGTERMException: after a SIGTERM, with exit status 143.
        """
        terminate, requeue = all_max(torch.tensor([self._terminate, self._requeue], dtype=torch.int64)).tolist()
        if requeue:
            self._requeue = False
            self._lightnings(signal.SIGUSR1, None)
        if terminate:
            path = save_now(self.trainer)
            _log_step(self.trainer)
            rank_zero_info(f"SIGTERM: the run ends after step {self.trainer.global_step}, which is saved in {path}")
            raise SIGTERMException(_EXIT)


def _log_step(trainer: pl.Trainer) -> None:
    """Hand the step's metrics to the loggers, which Lightning does after the hook in which a step is said to end."""
    trainer._logger_connector.on_batch_end()
    trainer._logger_connector.update_train_step_metrics()


def save_now(trainer: pl.Trainer) -> str:
    """Save where ``fit(ckpt_path="last")`` finds it, unless that is done for this step; return the path."""
    for callback in trainer.checkpoint_callbacks:
        if hasattr(callback, "save_now"):  # RolloutCheckpoint's, or that of a callback of one's own
            return str(callback.save_now(trainer))
    folder = getattr(trainer.checkpoint_callback, "dirpath", None) or trainer.default_root_dir
    path = str(Path(folder) / "last-preempted.ckpt")  # every name that begins with "last" will do
    trainer.save_checkpoint(path)
    return path
