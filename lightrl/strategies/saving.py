"""The half of a strategy that saves and loads: whole checkpoints, and every rank's random state in them."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lightrl.checkpoints import CheckpointWriter, check_checkpoint
from lightrl.distributed import all_objects, rank, world_size
from lightrl.progress import keep_due_validation
from lightrl.rng import random_state, set_random_state

_RANDOM = "lightrl_random"


class SavingStrategy(ModelParallelStrategy):
    """One process saves one file, several a distributed checkpoint; each is there whole or not at all.

    Args:
        save_in_background: write checkpoints on a thread, from a copy in CPU memory, while training goes on.
        kwargs: Lightning's.
    """

    def __init__(self, save_in_background: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.save_in_background = save_in_background
        self._writer: CheckpointWriter | None = None
        self._random: dict[str, Any] | None = None

    @property
    def _checkpoints(self) -> CheckpointWriter:
        if self._writer is None:
            self._writer = CheckpointWriter(self.save_in_background)
        return self._writer

    def _is_ours(self, path: Any) -> bool:
        """Whether a path is a local one, with no plugin of the user's in charge of it."""
        return "://" not in str(path) and type(self.checkpoint_io) is TorchCheckpointIO

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        checkpoint[_RANDOM] = all_objects(random_state())
        keep_due_validation(self.lightning_module.trainer, checkpoint)  # type: ignore[union-attr]
        if storage_options is None and self._is_ours(filepath):
            self._checkpoints.save(checkpoint, Path(self.broadcast(filepath)))
        else:
            super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        if not self._is_ours(filepath):
            super().remove_checkpoint(filepath)
        elif self.is_global_zero:
            self._checkpoints.remove(Path(filepath))

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        if self._writer is not None:
            self._writer.wait()  # it may be the one to load
        if self._is_ours(checkpoint_path):
            check_checkpoint(checkpoint_path)
        base_left_out = getattr(self.lightning_module, "base_left_out", lambda *_: nullcontext())
        try:
            with base_left_out(checkpoint_path, weights_only):
                loaded = super().load_checkpoint(checkpoint_path, weights_only)
        except KeyError as error:
            raise ValueError(
                f"{checkpoint_path} does not fit this module: {str(error.args[0]).partition(' To disable')[0]} It was "
                "saved with another `model`, `lora`, `trainable` or `critic`: give the module the arguments it had then"
            ) from error
        states = loaded.get(_RANDOM)
        if states is not None and len(states) != world_size():
            rank_zero_warn(
                f"the checkpoint is of {len(states)} ranks and the run has {world_size()}: what draws random numbers "
                "while it trains draws others than an unbroken run, and samples without deterministic=True are others"
            )
        self._random = states[rank()] if states is not None and len(states) == world_size() else None
        return loaded

    @override
    def on_train_start(self) -> None:
        # The last thing before the first step: whatever has been drawn until now was not part of the unbroken run.
        super().on_train_start()
        if self._random is not None:
            set_random_state(self._random)
            self._random = None

    @override
    def teardown(self) -> None:
        writer, self._writer = self._writer, None
        self._random = None  # of a checkpoint that was only validated: the next fit is not a resumed one
        try:
            if writer is not None:
                writer.close()
        finally:
            super().teardown()
