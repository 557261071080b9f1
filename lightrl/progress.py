"""What Lightning's loops say of themselves in a checkpoint, where they would say too little."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import lightning.pytorch as pl


def keep_due_validation(trainer: pl.Trainer, checkpoint: dict[str, Any]) -> None:
    """Have a run that is resumed from ``checkpoint`` validate first, if validation is due after the step just done.

    ``ModelCheckpoint(every_n_train_steps=...)`` saves between a step and the validation that follows it. Lightning
    would take that for done; the checkpoint of a run that stopped in the middle of its validation it reads right.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    progress = loop.batch_progress.total
    between = progress.ready == progress.processed == progress.completed + 1
    # Private, but the one place that knows all the ways in which a validation can be asked for.
    if not trainer.training or not between or not loop._should_check_val_fx(trainer.fit_loop._data_fetcher):
        return
    state = checkpoint["loops"]["fit_loop"]
    for counts in ("total", "current"):
        state["epoch_loop.batch_progress"][counts]["completed"] += 1
    validation = state["epoch_loop.val_loop.batch_progress"]
    validation["total"] |= dict.fromkeys(("ready", "started"), validation["total"]["completed"] + 1)
    validation["current"] |= {"ready": 1, "started": 1, "processed": 0, "completed": 0}
