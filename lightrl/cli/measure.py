"""A few steps of a colocated run, to plan by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightrl.callbacks import ThroughputMonitor
from lightrl.distributed import all_objects
from lightrl.planning import StepSeconds, with_fixed_share

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightrl.datamodule import RolloutDataModule
    from lightrl.meter import Meter


_MANY_STEPS = 10**9


class StageClock(ThroughputMonitor):
    """Keeps the seconds of each stage of each rollout batch, and ends training after ``count`` of them.

    Beside them stand this rank's ``tokens`` in completions and those of the ``longest``.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.batches: list[dict[str, float]] = []

    @override
    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        super().on_train_batch_end(trainer, *args)
        trainer.should_stop = len(self.batches) >= self.count

    @override
    def _meter(self, tally: Any, ranks: int, engine_ranks: int) -> Meter:
        self.batches.append(tally.seconds | {"tokens": tally.generated_tokens, "longest": tally.longest})
        return super()._meter(tally, ranks, engine_ranks)


def measured_step(trainer: Trainer, module: Any, data: RolloutDataModule, batches: int, **loading: Any) -> StepSeconds:
    """Train on rollout batches of the whole size, then of half of it, and return the seconds of one.

    ``loading`` is what ``Trainer.fit`` loads a checkpoint by.

    Nothing is saved or logged; the policy is trained meanwhile.

    Raises:
        ValueError: see :func:`check_measurable`.
    """
    check_measurable(trainer, data, batches)
    whole = data.prompts_per_step
    trainer.loggers = []
    trainer.limit_val_batches = trainer.num_sanity_val_steps = 0
    found: list[Any] = []
    try:
        for prompts in (whole, whole // 2):
            data.prompts_per_step = prompts
            found.append(_seconds(trainer, module, data, batches, {} if found else loading))
    finally:
        data.prompts_per_step = whole
    return step_of(*found)


def step_of(full: dict[str, float], half: dict[str, float]) -> StepSeconds:
    """Return the seconds of a step from means of :class:`StageClock`, of all prompts and of half of them."""
    stages = {stage: full[stage] for stage in ("generate", "train", "reward", "sync", "swap")}
    lengths = {name: (full[name], half[name]) for name in ("tokens", "longest")}
    return with_fixed_share(StepSeconds(**stages), half["generate"], **lengths)


def check_measurable(trainer: Trainer, data: RolloutDataModule, batches: int) -> None:
    """Refuse what cannot be measured.

    Raises:
        ValueError: ``batches`` is below 2 (the first one warms up and does not count), the strategy samples ahead, or
            the prompts of a step cannot be halved.
    """
    if batches < 2:
        raise ValueError(f"batches={batches} must be at least 2: the first one warms up and does not count")
    if getattr(trainer.strategy, "overlaps", False):
        raise ValueError(
            f"{type(trainer.strategy).__name__} samples ahead: the plan starts from a run in turns. Use "
            "--trainer.strategy colocated_vllm"
        )
    ranks = trainer.num_devices * trainer.num_nodes
    if data.prompts_per_step % (2 * ranks):
        raise ValueError(
            f"prompts_per_step={data.prompts_per_step} cannot be halved on {ranks} ranks: use a multiple of {2 * ranks}"
        )


def _seconds(
    trainer: Trainer, module: Any, data: RolloutDataModule, batches: int, loading: dict[str, Any]
) -> dict[str, float]:
    """Return the mean seconds of each stage and lengths, the largest of all ranks', of all batches but the first."""
    clock = StageClock(batches)
    trainer.callbacks = [clock]  # type: ignore[attr-defined]
    # The clock ends it; but a learning rate's schedule has to know an end.
    trainer.fit_loop.max_epochs, trainer.fit_loop.epoch_loop.max_steps = -1, _MANY_STEPS
    trainer.fit(module, datamodule=data, **loading)
    warm = clock.batches[1:]
    mine = {stage: sum(b[stage] for b in warm) / len(warm) for stage in warm[0]}
    everyone = all_objects(mine)
    return {stage: max(theirs[stage] for theirs in everyone) for stage in mine}
