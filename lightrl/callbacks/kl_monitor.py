"""How far the policy has gone from its reference, and how far sampler and trainer are apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lightrl import kl
from lightrl.arguments import check_numbers
from lightrl.distributed import all_sum
from lightrl.meter import Meter, log_step
from lightrl.packing import StepBatch, completion_mask

if TYPE_CHECKING:
    import lightning.pytorch as pl

TO_REFERENCE, MISMATCH = "kl/ref", "kl/mismatch"


class KLMonitor(Callback):
    """Logs the KL to the reference by k1 and by completion, beside the module's k3, and may end a run that drifts.

    The module itself logs the k3 estimates ``kl/ref`` (current policy to reference) and ``kl/mismatch`` (sampler to
    trainer). This adds, of the policy as it was before its first update on these rollouts, ``kl/ref_k1`` (mean over
    live tokens: unbiased, may be negative) and ``kl/ref_per_completion`` (the sum over a completion, mean over
    completions). Estimators: :mod:`lightrl.kl`.

    Args:
        reference: keep a frozen copy of the initial policy to measure to, also where ``kl_coef`` is 0 and the loss
            needs none. It costs the memory of another model and a pass over each rollout batch; with LoRA the pass
            alone.
        stop_above: end the run after a step whose ``kl/ref`` is above it.
        stop_mismatch_above: end the run after a step whose ``kl/mismatch`` is above it: the engine then does not
            sample from the policy that is trained.

    Raises:
        ValueError: a bound is negative; there is no reference for ``stop_above``; or ``reference`` comes too late, to
            a module that was trained without.
    """

    def __init__(
        self, reference: bool = False, stop_above: float | None = None, stop_mismatch_above: float | None = None
    ) -> None:
        bounds = {"stop_above": stop_above, "stop_mismatch_above": stop_mismatch_above}
        check_numbers(**{name: bound for name, bound in bounds.items() if bound is not None})
        self.reference = reference
        self.bounds = {TO_REFERENCE: stop_above, MISMATCH: stop_mismatch_above}

    @override
    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        if stage == "fit" and self.reference:
            pl_module.require_reference()

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if self.bounds[TO_REFERENCE] is not None and not pl_module.has_reference:
            raise ValueError(
                f"stop_above={self.bounds[TO_REFERENCE]} without a reference to measure to: use "
                "KLMonitor(reference=True), or a kl_coef above 0"
            )

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: StepBatch, batch_idx: int
    ) -> None:
        if pl_module.has_reference:
            log_step(pl_module, to_reference(batch).means(all_sum))
        for name, bound in self.bounds.items():
            found = float(trainer.callback_metrics.get(name, 0.0))  # no live token yet: no KL
            if bound is not None and not found <= bound:  # NaN is no better
                trainer.should_stop = True
                rank_zero_warn(f"{name} is {found:.4g} at step {trainer.global_step}, above {bound}: the run ends here")


def to_reference(batch: StepBatch) -> Meter:
    """Return this rank's ``kl/ref_k1`` and ``kl/ref_per_completion``."""
    meter = Meter()
    for name in ("kl/ref_k1", "kl/ref_per_completion"):
        meter.add_sum(name, 0.0, 0.0)  # every rank must have the same names
    for r in batch.rollouts:
        if r.ref_logprobs is not None:
            live = completion_mask(r)
            found = kl.k1(r.old_logprobs, r.ref_logprobs, loss_mask=live)
            meter.add("kl/ref_k1", found, mask=live)
            meter.add("kl/ref_per_completion", found.sum())
    return meter
