"""Where the time of a step goes, and how far each part is from the least that it can be."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback
from typing_extensions import override

from lightrl.arguments import check_numbers
from lightrl.distributed import all_sum
from lightrl.floors import STAGES, Hardware, generation_bytes, hardware_of, heads_width, push_bytes, training_flops
from lightrl.memory import ModelSize, model_size
from lightrl.meter import Meter, log_step
from lightrl.packing import StepBatch
from lightrl.types import Rollout

if TYPE_CHECKING:
    import lightning.pytorch as pl

_MEASURED = {
    "time/generate": "generate",
    "time/reward": "reward",
    "time/swap": "swap",
    "time/wait": "wait",
}


@dataclass(slots=True)
class _Tally:
    """Of one rollout batch, on this rank."""

    started: float = field(default_factory=time.perf_counter)
    paused: float = 0.0
    """Seconds of validation."""
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    steps: int = 0
    generated_tokens: float = 0.0
    """In all completions that were sampled here, also those that are left out of training."""
    longest: float = 0.0
    """Completion of any rank."""
    rollouts: list[Rollout] = field(default_factory=list)
    trained_tokens: int = 0
    flops: float = 0.0


class ThroughputMonitor(Callback):
    """Logs tokens a second, MFU, the split of time, and floors, once for each rollout batch.

    A rollout batch's time runs to the end of its last optimizer step, validation left out. ``split/STAGE`` is each
    stage's share of it (see ``STAGES``); their sum is 1. ``perf/generated_tokens_per_second`` counts completion tokens
    and ``perf/trained_tokens_per_second`` whole sequences, prompts included, over all ranks and that whole time.
    Where the hardware's peaks are known: ``perf/mfu``, the share of the peak that forward and backward reach during
    ``train`` (recomputation is no use), and ``floor/generate``, ``floor/train``, ``floor/sync`` in seconds
    (:mod:`lightrl.floors`), to be held against ``time/generate``, ``time/train_step`` and ``time/weight_sync``;
    ``perf/of_floor`` is the whole time over the sum of the floors. Rewards and swaps have no floor but 0.

    Args:
        peak_flops: operations a second of one device; None: what Lightning knows of the GPU, nothing of a CPU.
        peak_bandwidth: bytes a second of one device's memory; None: what the GPU's driver says, nothing of a CPU.

    Raises:
        ValueError: a peak is not a number above 0.
    """

    def __init__(self, peak_flops: float | None = None, peak_bandwidth: float | None = None) -> None:
        for name, value in {"peak_flops": peak_flops, "peak_bandwidth": peak_bandwidth}.items():
            if value is not None:
                check_numbers(**{name: value})
                if not value:
                    raise ValueError(f"{name}={value} must be above 0")
        self.peaks = Hardware(peak_flops, peak_bandwidth)
        self.hardware = self.peaks
        self._size: ModelSize | None = None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        dtype = torch.float32 if trainer.precision == "32-true" else torch.bfloat16
        found = hardware_of(pl_module.device, dtype)
        self.hardware = Hardware(self.peaks.flops or found.flops, self.peaks.bandwidth or found.bandwidth)
        self._value_bytes = dtype.itemsize
        config = pl_module.policy.config
        self._size = model_size(
            config,
            lora=pl_module.lora,
            trainable=pl_module.trainable,
            trust_remote_code=pl_module.trust_remote_code,
        )
        self._heads_width = heads_width(config)
        self._tally = _Tally()

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._validating_since = time.perf_counter()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if self._size is not None:  # otherwise it is the sanity check, before the start
            self._tally.paused += time.perf_counter() - self._validating_since

    def on_weights_synced(self, trainer: pl.Trainer, pl_module: Any, policy_version: int, seconds: float) -> None:
        """Count a push (see :class:`~lightrl.strategies.RolloutStrategy`)."""
        if trainer.training:
            self._tally.seconds["sync"] += seconds

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: StepBatch, batch_idx: int) -> None:
        self._step_started = time.perf_counter()
        if batch.times_used:
            return
        for name, stage in _MEASURED.items():
            self._tally.seconds[stage] += batch.measured.get(name, (0.0, 1.0))[0]
        self._tally.generated_tokens = batch.measured["rollout/length_mean"][0]
        self._tally.longest = batch.measured["rollout/length_max"][0]

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: StepBatch, batch_idx: int
    ) -> None:
        assert self._size is not None
        tally, data = self._tally, trainer.datamodule  # type: ignore[attr-defined]
        tally.seconds["train"] += time.perf_counter() - self._step_started
        lengths = [len(r.prompt_ids) + len(r.completion_ids) for r in batch.rollouts]
        tally.trained_tokens += sum(lengths)
        tally.flops += training_flops(self._size, self._heads_width, lengths)
        if batch.times_used < data.minibatches_per_rollout:  # later passes are over the same ones
            tally.rollouts += batch.rollouts
        tally.steps += 1
        steps_per_rollout = data.epochs_per_rollout * data.minibatches_per_rollout
        if batch.times_used + 1 < steps_per_rollout:
            return
        if tally.steps == steps_per_rollout:  # otherwise the run was resumed amid them
            engine_ranks = getattr(trainer.strategy, "rollout_tp_size", 1)
            log_step(pl_module, self._meter(tally, trainer.world_size, engine_ranks).means(all_sum))
        self._tally = _Tally()

    def _meter(self, tally: _Tally, ranks: int, engine_ranks: int) -> Meter:
        whole = time.perf_counter() - tally.started - tally.paused
        meter, seconds = Meter(), dict(tally.seconds)
        seconds["other"] = whole - sum(seconds.values())
        for stage in STAGES:
            meter.add_sum(f"split/{stage}", seconds[stage], whole)
        meter.add_sum("perf/generated_tokens_per_second", tally.generated_tokens * ranks, whole)
        meter.add_sum("perf/trained_tokens_per_second", tally.trained_tokens * ranks, whole)
        if self.hardware.flops is not None:
            meter.add_sum("perf/mfu", tally.flops, seconds["train"] * self.hardware.flops)
        floors = self._floors(tally, engine_ranks)
        for stage, floor in floors.items():
            meter.add(f"floor/{stage}", floor)
        if floors:
            meter.add_sum("perf/of_floor", whole, sum(floors.values()))
        return meter

    def _floors(self, tally: _Tally, engine_ranks: int) -> dict[str, float]:
        """Return the least seconds of each stage that this rank takes part in, where the hardware's peak is known."""
        assert self._size is not None
        floors = {}
        if self.hardware.flops is not None:
            floors["train"] = tally.flops / self.hardware.flops
        if self.hardware.bandwidth is not None:
            if tally.seconds["generate"]:  # engines of their own have other devices
                read = generation_bytes(self._size, tally.rollouts, self._value_bytes, engine_ranks)
                floors["generate"] = read / self.hardware.bandwidth
            floors["sync"] = push_bytes(self._size, self._value_bytes) / engine_ranks / self.hardware.bandwidth
        return floors
