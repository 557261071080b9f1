"""How old the weights are that sampled what is trained on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lightrl.distributed import all_max, all_sum
from lightrl.meter import Meter, log_step
from lightrl.packing import StepBatch, completion_mask

if TYPE_CHECKING:
    import lightning.pytorch as pl


class StalenessMonitor(Callback):
    """Logs, at every optimizer step, the age of each token's weights, reuse of rollouts included.

    Age is counted in optimizer steps, from the weights that sampled a token to the step that trains on it:
    ``staleness/token_mean`` and ``staleness/token_max`` over live tokens, ``staleness/mixed_frac`` (completions whose
    tokens came from more than one version) and ``staleness/since_push`` (age of the engine's weights).

    Args:
        stop_above: end the run after a step with an older token.

    Raises:
        ValueError: ``stop_above`` is negative.
    """

    def __init__(self, stop_above: int | None = None) -> None:
        if stop_above is not None and stop_above < 0:
            raise ValueError(f"stop_above={stop_above} must be 0 or more: it counts optimizer steps")
        self.stop_above = stop_above

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: StepBatch, batch_idx: int) -> None:
        strategy: Any = trainer.strategy
        means = ages(batch, trainer.global_step).means(all_sum, all_max)
        log_step(pl_module, means | {"staleness/since_push": float(trainer.global_step - strategy.policy_version)})
        oldest = means["staleness/token_max"]
        if self.stop_above is not None and oldest > self.stop_above:
            trainer.should_stop = True
            rank_zero_warn(
                f"step {trainer.global_step} trains on tokens of weights {oldest:.0f} steps old, above "
                f"stop_above={self.stop_above}: the run ends here"
            )


def ages(batch: StepBatch, step: int) -> Meter:
    """Return this rank's metrics of ``batch``, trained on when ``step`` optimizer steps are done."""
    meter = Meter()
    for micro in batch.micro:
        age = step - micro.policy_versions
        meter.add("staleness/token_mean", age, mask=micro.loss_mask)
        meter.add_max("staleness/token_max", age, mask=micro.loss_mask)
    versions = [r.policy_versions[completion_mask(r)] for r in batch.rollouts if len(r.policy_versions)]
    mixed = sum(len(v) > 0 and int(v.min()) < int(v.max()) for v in versions)
    meter.add_sum("staleness/mixed_frac", mixed, len(versions))
    return meter
