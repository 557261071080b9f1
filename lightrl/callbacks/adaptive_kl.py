"""A KL coefficient that seeks a KL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback
from typing_extensions import override

from lightrl.arguments import check_numbers
from lightrl.callbacks.kl_monitor import TO_REFERENCE
from lightrl.meter import log_step
from lightrl.packing import StepBatch

if TYPE_CHECKING:
    import lightning.pytorch as pl

LARGEST_ERROR = 0.2


class AdaptiveKL(Callback):
    """Raises the module's ``kl_coef`` while ``kl/ref`` is above a target and lowers it below (arXiv:1909.08593, 2.2).

    At the first step of each rollout batch ``kl_coef`` is multiplied by ``1 + rate * clip(kl / target - 1, -0.2, 0.2)``
    and logged as ``kl/coef``. Checkpoints keep it.

    Args:
        target: of ``kl/ref``, a mean over tokens.
        rate: at most 0.2 of this is the relative change at one rollout batch.

    Raises:
        ValueError: ``target`` is not above 0, ``rate`` is not between 0 and 1, or the module's ``kl_coef`` is 0.

    Example:
        >>> round(AdaptiveKL(target=0.01, rate=0.5).adapted(1.0, 0.02), 4)  # twice the target: the largest error, 0.2
        1.1
    """

    def __init__(self, target: float, rate: float = 0.1) -> None:
        check_numbers(target=target)
        check_numbers(1.0, rate=rate)
        if not target:
            raise ValueError(f"target={target} must be above 0: a policy that learns leaves its reference")
        self.target, self.rate = target, rate
        self.kl_coef: float | None = None

    def adapted(self, kl_coef: float, found: float) -> float:
        """Return the coefficient that follows ``kl_coef`` where the KL is ``found``."""
        error = min(max(found / self.target - 1, -LARGEST_ERROR), LARGEST_ERROR)
        return kl_coef * (1 + self.rate * error)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        self.kl_coef = None  # of an earlier fit; a checkpoint is loaded after this
        if stage == "fit" and not pl_module.kl_coef > 0:
            raise ValueError(f"AdaptiveKL with kl_coef={pl_module.kl_coef}: give the module one above 0 to start from")

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if self.kl_coef is not None:
            pl_module.kl_coef = self.kl_coef

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: StepBatch, batch_idx: int
    ) -> None:
        if batch.times_used == 0 and pl_module.anything_live:  # otherwise the KL is still that of an earlier step
            pl_module.kl_coef = self.adapted(pl_module.kl_coef, float(trainer.callback_metrics[TO_REFERENCE]))
        self.kl_coef = pl_module.kl_coef
        log_step(pl_module, {"kl/coef": self.kl_coef})

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"kl_coef": self.kl_coef}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.kl_coef = state_dict["kl_coef"]
