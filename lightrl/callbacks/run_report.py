"""The run on one page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lightrl.arguments import check_at_least_one
from lightrl.report.page import write_report

if TYPE_CHECKING:
    import lightning.pytorch as pl


class RunReport(Callback):
    """Writes ``report.html`` into the run's folder: curves, time split, samples coloured by reward.

    One file that needs no network. It is written when training ends, also by an error, and made anew at any time by
    ``lightrl report FOLDER``. Curves come from a TensorBoardLogger's or CSVLogger's files, samples from
    :class:`~lightrl.callbacks.RolloutLogger`, the time split from :class:`~lightrl.callbacks.ThroughputMonitor`. A
    ``fast_dev_run`` leaves no files, and no page.

    Args:
        every_n_steps: also write it after so many optimizer steps, again and again; None: at the end only.

    Raises:
        ValueError: ``every_n_steps`` is below 1, or the Trainer has neither of the two loggers.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        check_at_least_one(every_n_steps=every_n_steps)
        self.every_n_steps = every_n_steps
        self._folder: Path | None = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._folder = None
        if stage != "fit" or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        logger = next((x for x in trainer.loggers if isinstance(x, CSVLogger | TensorBoardLogger)), None)
        if logger is None:
            names = ", ".join(type(x).__name__ for x in trainer.loggers) or "no logger"
            raise ValueError(
                f"RunReport with {names}: it reads the files of a TensorBoardLogger or CSVLogger. Give the Trainer one "
                "(it may have several loggers), or leave RunReport out"
            )
        self._folder = Path(trainer.strategy.broadcast(logger.log_dir))

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # Not at the end of a step, whose metrics reach the loggers after it.
        done = trainer.global_step
        if self.every_n_steps is not None and done and done % self.every_n_steps == 0:
            self._write(trainer)

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._write(trainer)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if trainer.global_step:  # otherwise there is nothing to see yet
            self._write(trainer)

    def _write(self, trainer: pl.Trainer) -> None:
        if self._folder is None or not trainer.is_global_zero:
            return
        for logger in trainer.loggers:
            logger.save()
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.flush()
        path = write_report(self._folder)
        if trainer.state.finished:
            rank_zero_info(f"report of the run: {path}")
