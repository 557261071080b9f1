"""Checkpoints of the last steps, from which a run goes on exactly, and which an engine serves."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

from lightrl.arguments import check_at_least_one

if TYPE_CHECKING:
    import lightning.pytorch as pl

_NAME = re.compile(r"step=\d+$")


class RolloutCheckpoint(ModelCheckpoint):
    """Saves every few steps, and at the end, and keeps the newest; ``fit(ckpt_path="last")`` goes on from the newest.

    Args:
        dirpath: folder of the checkpoints; None: Lightning's own choice.
        every_n_steps: optimizer steps between two checkpoints.
        keep_last: how many are kept.
        export: write a Hugging Face folder beside each (see :func:`lightrl.export.export`), which ``vllm serve`` loads.
        export_dtype: of its weights; None: the policy's own.

    Raises:
        ValueError: ``every_n_steps`` or ``keep_last`` is below 1.

    Example:
        ``RolloutCheckpoint("runs/a", every_n_steps=20, export=True)`` leaves ``step=20.ckpt``, ``step=20``, ... there.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        every_n_steps: int = 10,
        keep_last: int = 2,
        export: bool = False,
        export_dtype: str | None = None,
    ) -> None:
        check_at_least_one(every_n_steps=every_n_steps, keep_last=keep_last)
        super().__init__(dirpath, every_n_train_steps=every_n_steps, enable_version_counter=False)
        self.every_n_steps, self.keep_last = every_n_steps, keep_last
        self.export, self.export_dtype = export, export_dtype
        self._saved: list[str] = []

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and not trainer.global_step:  # another run's steps have the same numbers
            self._last_global_step_saved, self._saved = 0, []

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        last_of_all = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch and (
            trainer.current_epoch + 1 == trainer.max_epochs
        )
        due = step % self.every_n_steps == 0 or step == trainer.max_steps or last_of_all
        if due and not self._should_skip_saving_checkpoint(trainer):
            self.save(trainer)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Nothing: steps alone count."""

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Nothing: steps alone count."""

    def save(self, trainer: pl.Trainer) -> str:
        """Save a checkpoint of now, and remove those that are too many (all ranks call it together)."""
        assert self.dirpath is not None
        path = str(Path(self.dirpath) / f"step={trainer.global_step}.ckpt")
        self._saved = [p for p in self._saved if p != path] + [path]
        self.best_model_path = self.last_model_path = path  # part of what is saved
        self._save_checkpoint(trainer, path)
        if self.export:
            from lightrl.export import export  # here: `python -m lightrl.export` imports this file first

            export(trainer.lightning_module, path.removesuffix(self.FILE_EXTENSION), dtype=self.export_dtype)  # type: ignore[arg-type]
        while len(self._saved) > self.keep_last:
            old = self._saved.pop(0)
            trainer.strategy.remove_checkpoint(old)
            if self.export:
                trainer.strategy.remove_checkpoint(old.removesuffix(self.FILE_EXTENSION))
        return path

    def save_now(self, trainer: pl.Trainer) -> str:
        """Save a checkpoint, unless that is done for this step; return its path (all ranks call it together)."""
        done = self._last_global_step_saved == trainer.global_step
        return self.last_model_path if done else self.save(trainer)

    @property
    @override
    def state_key(self) -> str:
        return type(self).__qualname__  # Lightning's would forget what is saved when every_n_steps changes

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"dirpath": str(self.dirpath), "saved": list(self._saved)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if str(self.dirpath) == state_dict["dirpath"]:  # those of another folder are not ours to remove
            self._saved = list(state_dict["saved"])
            self.best_model_path = self.last_model_path = self._saved[-1] if self._saved else ""

    @override
    def _find_last_checkpoints(self, trainer: pl.Trainer) -> set[str]:
        # Private, but what fit(ckpt_path="last") asks: Lightning's looks for a second copy under the name "last".
        named = super()._find_last_checkpoints(trainer)
        own = Path(self.dirpath).glob(f"step=*{self.FILE_EXTENSION}") if self.dirpath else ()
        # What SLURM's requeue signal saved: Lightning takes it where no path is given, and here it may be the newest.
        requeued = trainer._checkpoint_connector._hpc_resume_path if SLURMEnvironment.detect() else None
        return named | {str(p) for p in own if _NAME.match(p.stem)} | ({requeued} if requeued else set())
