"""The Lightning half of RLModule: one training step is one optimizer step, checked, measured and logged."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor
from torchmetrics import MeanMetric

from lightrl import kl
from lightrl.arguments import check_loss
from lightrl.corrections import Correction
from lightrl.distributed import all_max, all_sum
from lightrl.finite import FiniteCheck
from lightrl.masked import bounded_exp
from lightrl.meter import Meter, log_step
from lightrl.optim import make_optimizer, schedule_factor
from lightrl.packing import MicroBatch, StepBatch
from lightrl.policy import PolicyForward
from lightrl.reference import Reference
from lightrl.sharding import clip_to_norm, total_norm
from lightrl.types import Rollout, RolloutBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TOKENS = "train/num_tokens"


class StepModule(LightningModule):
    """Trains ``policy`` on a ``loss`` that a subclass defines (see :class:`lightrl.RLModule`)."""

    policy: PreTrainedModel
    lr: float
    betas: tuple[float, float]
    weight_decay: float
    warmup_steps: int
    schedule: str
    optimizer_name: str
    entropy_coef: float
    correction: Correction | None
    on_nonfinite: str

    def __init__(self, packed: bool | None, share_prefix: bool = True) -> None:
        super().__init__()
        self.policy_forward = PolicyForward(packed, share_prefix)
        self.val_metrics = torch.nn.ModuleDict({"reward": MeanMetric(), "pass@1": MeanMetric()})
        self._reference: list[Reference] = []  # one or none
        self._step_started = self._batch_started = time.perf_counter()
        self.anything_live = True
        """Whether the last step had a live token on any rank and was not skipped for a NaN: else it changed nothing."""
        self._measured: tuple[Callable[[], dict[str, float]], FiniteCheck, list[Rollout]] | None = None
        self._skipped = 0

    def loss(self, batch: MicroBatch, logprobs: Tensor) -> tuple[Tensor, dict[str, Tensor | float]]:
        """The loss of one micro-batch, and metrics."""
        raise NotImplementedError

    def aggregate(self, terms: Tensor, batch: MicroBatch) -> Tensor:
        """Add up per-token loss terms [N]."""
        raise NotImplementedError

    def parameter_groups(self) -> list[tuple[Iterable[torch.nn.Parameter], float]]:
        """Parameters, and the learning rate of each lot."""
        raise NotImplementedError

    # -- training -----------------------------------------------------------------------------------------------------

    def training_step(self, batch: StepBatch, batch_idx: int) -> Tensor:
        """One optimizer step: every micro-batch but the last runs its backward here, the last one's is Lightning's."""
        strategy: Any = self.trainer.strategy
        self.trainer.optimizers[0].zero_grad()
        meter, check, before = Meter(), FiniteCheck(), torch.zeros((), device=self.device)
        self._measured = None  # of a step that failed
        for micro in batch.micro[:-1]:
            loss = self._micro_loss(micro, meter, check, last=False)
            strategy.backward(loss, None)
            before += loss.detach()
        loss = self._micro_loss(batch.micro[-1], meter, check, last=True) + before
        meter.add("train/loss", loss)
        self._measured = self._reduced(batch, meter), check, batch.rollouts
        return loss

    def _micro_loss(self, micro: MicroBatch, meter: Meter, check: FiniteCheck, *, last: bool) -> Tensor:
        strategy: Any = self.trainer.strategy
        if hasattr(strategy, "sync_gradients"):
            strategy.sync_gradients(last)
        loss, metrics, logprobs, entropy = self.full_loss(micro)
        meter.add_sum(_TOKENS, micro.loss_mask.sum(), 0.0)
        check.note(micro, logprobs.detach(), loss.detach(), meter)
        meter.add_all(metrics, micro.loss_mask)
        meter.add("train/entropy", entropy, mask=micro.loss_mask)
        self._measure(micro, logprobs.detach(), meter)
        return loss * self.trainer.world_size  # data parallelism averages gradients over ranks

    def full_loss(self, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor | float], Tensor, Tensor]:
        """Return what a micro-batch adds to the step's loss, entropy bonus included; metrics, logprobs and entropy."""
        logprobs, entropy = self.policy_forward(self.policy, micro, entropy_grad=self.entropy_coef > 0)
        loss, metrics = check_loss(type(self).__name__, self.loss(micro, logprobs))
        if self.entropy_coef > 0:
            loss = loss - self.entropy_coef * self.aggregate(entropy, micro)
        return loss, metrics, logprobs, entropy

    def _measure(self, micro: MicroBatch, logprobs: Tensor, meter: Meter) -> None:
        live, old = micro.loss_mask, logprobs if micro.old_logprobs is None else micro.old_logprobs
        meter.add("kl/mismatch", kl.k3(micro.rollout_logprobs, old), mask=live)
        if self._reference and micro.ref_logprobs is not None:  # an idle rollout has some in any case
            meter.add("kl/ref", kl.k3(logprobs, micro.ref_logprobs), mask=live)
        if self.correction is not None:
            gap = old - micro.rollout_logprobs
            meter.add("mismatch/logprob_diff_mean", gap.abs(), mask=live)
            meter.add_quantile("mismatch/logprob_diff_p99", gap.abs(), 0.99, mask=live)
            meter.add_max("mismatch/logprob_diff_max", gap.abs(), mask=live)
            meter.add("mismatch/ratio", bounded_exp(gap), mask=live)
            meter.add("mismatch/ratio_squared", bounded_exp(gap).double().square(), mask=live)

    def _reduced(self, batch: StepBatch, meter: Meter) -> Callable[[], dict[str, float]]:
        """Begin to add the step's measures up over ranks; they are asked for when the last backward is under way."""
        now = time.perf_counter()
        seconds, self._step_started = now - self._step_started, now
        tokens = sum(m.num_tokens for m in batch.micro)
        meter.add_sum("perf/tokens_per_second", tokens * self.trainer.world_size, seconds)
        meter.add_sum(_TOKENS, 0.0, 1 / self.trainer.world_size)  # what is left of the mean is the sum over ranks
        for name, (total, count) in batch.measured.items():
            meter.add_sum(name, total, count)
        return meter.reduced(all_sum, all_max)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Lightning's; while a GPU is at the last one of a step, wait for what its forwards have shown, and log it.

        Raises:
            RuntimeError: NaN or inf among the live tokens, before it reaches the weights (``on_nonfinite="raise"``).
        """
        super().backward(loss, *args, **kwargs)
        self._settle()

    def _settle(self) -> None:
        if self._measured is not None:
            means, check, rollouts = self._measured
            self._measured = None
            self._log(means(), check, rollouts)

    def _log(self, means: dict[str, float], check: FiniteCheck, rollouts: list[Rollout]) -> None:
        self.anything_live = means[_TOKENS] > 0
        bad = check.noted(means)
        if bad and self.on_nonfinite == "raise":
            raise check.error(rollouts, self.trainer.global_step, Path(self.trainer.default_root_dir))
        self.anything_live &= not bad
        if "mismatch/ratio_squared" in means:  # (sum w)^2 / (n sum w^2) over the whole step
            means["mismatch/effective_sample_size"] = means["mismatch/ratio"] ** 2 / means.pop("mismatch/ratio_squared")
        if self.on_nonfinite == "skip":
            means = {name: value for name, value in means.items() if math.isfinite(value) or not bad}
            self._skipped += bad
            means["train/skipped_steps"] = float(self._skipped)
        log_step(self, means, frozenset({"reward/mean", "kl/mismatch", "kl/ref", "perf/tokens_per_second"}))

    def on_train_batch_start(self, batch: StepBatch, batch_idx: int) -> None:
        """Start the clock of ``time/train_step``: the whole optimizer step, without making the rollouts."""
        self._batch_started = time.perf_counter()

    def on_train_batch_end(self, outputs: Any, batch: StepBatch, batch_idx: int) -> None:
        """Stop it, and heed signals: between two steps, after callbacks, is where a checkpoint is exact."""
        seconds = time.perf_counter() - self._batch_started
        log_step(self, {"time/train_step": seconds})
        strategy: Any = self.trainer.strategy
        if hasattr(strategy, "step_ended"):
            strategy.step_ended()

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        """Nothing: Lightning calls it after ``training_step``, where it would wipe the micro-batches already summed."""

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip as the Trainer says, and log ``train/grad_norm``: the norm before clipping, over all ranks.

        A step without a live token on any rank changes nothing: torch's optimizers skip parameters whose gradient is
        None, while one of zeros would let momentum and weight decay move them. It counts in ``global_step``.

        Raises:
            RuntimeError: the norm is NaN or inf, which does not reach the weights (``on_nonfinite="raise"``).
        """
        self._settle()  # once more, for those who replace backward()
        if not self.anything_live:
            _drop_gradients(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norm = float(total_norm(parameters))
        if not math.isfinite(norm):  # of finite losses: an overflow on the way back
            norm = self._refuse_gradient(optimizer, norm)
        log_step(self, {"train/grad_norm": norm})
        if gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        elif gradient_clip_val is not None and gradient_clip_val > 0:
            clip_to_norm(parameters, float(gradient_clip_val), norm)

    def _refuse_gradient(self, optimizer: Any, norm: float) -> float:
        """Raise, or skip the step; every rank has the same norm."""
        if self.on_nonfinite == "raise":
            raise RuntimeError(
                f"step {self.trainer.global_step}: the norm of the gradient is {norm}, though the loss is "
                "finite. The weights are still those of before this step. RLModule(on_nonfinite='skip') goes on "
                "without such steps"
            )
        _drop_gradients(optimizer)
        self._skipped += 1
        return 0.0

    def configure_optimizers(self) -> Any:
        """The optimizer, without decay on vectors, and the learning rates' schedule by optimizer step."""
        optimizer = make_optimizer(
            self.parameter_groups(), name=self.optimizer_name, betas=self.betas, weight_decay=self.weight_decay
        )
        if self.schedule == "constant" and not self.warmup_steps:
            return optimizer
        total = self.trainer.estimated_stepping_batches if self.schedule != "constant" else None
        factor = schedule_factor(self.schedule, self.warmup_steps, total)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def validation_step(self, batch: RolloutBatch, batch_idx: int) -> None:
        """Log ``val/reward`` and ``val/pass@1`` (share of completions whose reward is at least 1) over all prompts."""
        rewards = torch.tensor([r.reward for r in batch.rollouts if r.reward is not None], device=self.device)
        for name, values in (("reward", rewards), ("pass@1", (rewards >= 1).float())):
            metric = self.val_metrics[name]
            assert isinstance(metric, MeanMetric)
            metric.update(values, torch.ones_like(values)) if len(values) else metric.update(0.0, 0.0)
            self.log(f"val/{name}", metric, on_step=False, on_epoch=True, prog_bar=True, batch_size=1)

    def predict_step(self, batch: RolloutBatch, batch_idx: int) -> list[Rollout]:
        """Return the scored rollouts."""
        return batch.rollouts


def _drop_gradients(optimizer: Any) -> None:
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        p.grad = None
