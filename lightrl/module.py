"""The algorithm: a LightningModule whose training step is one optimizer step on one batch of rollouts."""

from __future__ import annotations

import copy
import time
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import MeanMetric

from lightrl import advantages as estimators
from lightrl import kl
from lightrl.distributed import all_sum
from lightrl.losses import aggregate, clipped_policy_terms
from lightrl.meter import Meter
from lightrl.optim import SCHEDULES, schedule_factor
from lightrl.packing import MicroBatch, StepBatch, pack, plan_micro_batches
from lightrl.policy import PolicyForward, load_policy, load_tokenizer, without_dropout
from lightrl.types import Rollout, RolloutBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

AGGREGATIONS = ("token", "sequence", "constant")


class RLModule(LightningModule):
    """GRPO (DeepSeekMath, arXiv:2402.03300) on any Hugging Face causal language model. Override ``loss`` to change it.

    Args:
        model: folder, hub name, or a ``PreTrainedModel`` (its parameters in float32).
        lr: peak learning rate of AdamW.
        betas: AdamW's.
        weight_decay: AdamW's, on matrices only.
        warmup_steps: optimizer steps over which the learning rate rises from 0.
        schedule: ``"constant"``, ``"linear"`` or ``"cosine"`` (the latter two fall to 0 at the run's end).
        clip_ratio_low: the ratio to the old policy counts down to ``1 - clip_ratio_low``.
        clip_ratio_high: and up to ``1 + clip_ratio_high``.
        kl_coef: weight of the KL to the frozen initial policy in the loss; above 0 a second copy of the model is kept.
        scale_rewards: divide a group's advantages by its standard deviation (GRPO) or not (Dr. GRPO).
        aggregation: ``"token"`` (mean over all tokens of the step), ``"sequence"`` (mean over sequences of their token
            means) or ``"constant"`` (sum over tokens / (sequences x longest allowed completion)).
        packed: lay sequences end to end without padding; None: where the model's attention allows it.
        trust_remote_code: run code that comes with the model.

    Raises:
        ValueError: an argument is out of range.
    """

    min_group_size = 2
    """A baseline from the group needs two completions of each prompt."""
    policy: PreTrainedModel
    model: str | PreTrainedModel

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        lr: float = 1e-6,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        schedule: str = "constant",
        clip_ratio_low: float = 0.2,
        clip_ratio_high: float = 0.2,
        kl_coef: float = 0.0,
        scale_rewards: bool = True,
        aggregation: str = "token",
        packed: bool | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__()
        model = str(model) if isinstance(model, Path) else model
        self.save_hyperparameters(ignore=[] if isinstance(model, str) else ["model"], logger=False)
        if aggregation not in AGGREGATIONS:
            raise ValueError(f"aggregation={aggregation!r} is not one of {', '.join(AGGREGATIONS)}")
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule={schedule!r} is not one of {', '.join(SCHEDULES)}")
        if not lr >= 0 or not kl_coef >= 0 or not 0 <= clip_ratio_low < 1 or not clip_ratio_high >= 0:
            raise ValueError(
                f"lr={lr}, kl_coef={kl_coef}, clip_ratio_low={clip_ratio_low}, clip_ratio_high={clip_ratio_high}: "
                "none may be negative, and clip_ratio_low must be below 1"
            )
        if not weight_decay >= 0 or warmup_steps < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                f"weight_decay={weight_decay}, warmup_steps={warmup_steps}, betas={betas}: the first two must not be "
                "negative, and each beta must be at least 0 and below 1"
            )
        object.__setattr__(self, "model", model)  # not a submodule: as such it would be saved beside the policy
        self.lr, self.betas, self.weight_decay = lr, betas, weight_decay
        self.warmup_steps, self.schedule = warmup_steps, schedule
        self.clip_ratio_low, self.clip_ratio_high = clip_ratio_low, clip_ratio_high
        self.kl_coef, self.scale_rewards, self.aggregation = kl_coef, scale_rewards, aggregation
        self.trust_remote_code = trust_remote_code
        self.policy_forward = PolicyForward(packed)
        self.val_metrics = torch.nn.ModuleDict({"reward": MeanMetric(), "pass@1": MeanMetric()})
        self._reference: list[PreTrainedModel] = []  # in a list: neither saved nor moved nor trained as a submodule
        self._step_started = self._batch_started = time.perf_counter()

    # -- models -------------------------------------------------------------------------------------------------------

    def configure_model(self) -> None:
        """Load the policy, and the reference where ``kl_coef`` wants one; the strategy shards both."""
        if not hasattr(self, "policy"):
            self.policy = self._load() if isinstance(self.model, str) else without_dropout(self.model)
        if self.kl_coef > 0 and not self._reference:
            reference = self._load() if isinstance(self.model, str) else copy.deepcopy(self.policy)
            self._reference.append(reference.requires_grad_(False).eval())

    def _load(self) -> PreTrainedModel:
        assert isinstance(self.model, str)
        return load_policy(self.model, trust_remote_code=self.trust_remote_code)

    @property
    def reference(self) -> PreTrainedModel | None:
        """The frozen initial policy, or None."""
        return self._reference[0] if self._reference else None

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""
        name: Any = self.model if isinstance(self.model, str) else self.model.config.name_or_path
        return load_tokenizer(name, trust_remote_code=self.trust_remote_code)

    def forward(self, micro: MicroBatch) -> Tensor:
        """Return the policy's logprobs, float32 [N], of a micro-batch's completion tokens."""
        return self.policy_forward(self.policy, micro)[0]

    # -- the algorithm ------------------------------------------------------------------------------------------------

    def advantages(self, batch: RolloutBatch) -> None:
        """Set ``advantage`` on every rollout of ``batch`` from the rewards of its group."""
        rollouts = batch.rollouts
        rewards = torch.tensor([float("nan") if r.reward is None else r.reward for r in rollouts])
        groups = torch.tensor([r.group_id for r in rollouts], dtype=torch.int64)
        estimate = estimators.group_zscore if self.scale_rewards else estimators.group_mean
        for rollout, advantage in zip(rollouts, estimate(rewards, groups).tolist(), strict=True):
            rollout.advantage = advantage

    def loss(self, batch: MicroBatch, logprobs: Tensor) -> tuple[Tensor, dict[str, Tensor | float]]:
        """The loss of one micro-batch: its part of the mean over the whole step.

        Args:
            batch: the micro-batch; every per-token tensor is [N].
            logprobs: float32 [N], the current policy's, with gradient.

        Returns:
            A scalar, so normalised (see :meth:`aggregate`) that the sum over all micro-batches and ranks is the loss
            of the step, and metrics: a tensor [N] is averaged over the step's live tokens, NaN entries skipped, and a
            number counts once for each live token.
        """
        old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        terms, metrics = clipped_policy_terms(
            logprobs,
            old,
            batch.advantages,
            clip_ratio_low=self.clip_ratio_low,
            clip_ratio_high=self.clip_ratio_high,
            loss_mask=batch.loss_mask,
        )
        if self.kl_coef > 0 and batch.ref_logprobs is not None:
            terms = terms + self.kl_coef * kl.reverse_kl(logprobs, batch.ref_logprobs, old, loss_mask=batch.loss_mask)
        return self.aggregate(terms, batch), {"train/clip_frac": metrics["clip_frac"]}

    def aggregate(self, terms: Tensor, batch: MicroBatch) -> Tensor:
        """Add up per-token loss terms [N] of live tokens over the step's denominator, as ``aggregation`` says."""
        return aggregate(
            terms, batch.loss_mask, batch.denominator, mode=self.aggregation, sequence_ids=batch.sequence_ids
        )

    def denominator(self, num_tokens: int, num_rollouts: int, max_completion_tokens: int) -> float:
        """What the step's summed loss terms are divided by: counts are over all ranks; 1 where nothing is live."""
        per_rollout = {"token": 0, "sequence": 1, "constant": max_completion_tokens}[self.aggregation]
        return float(max(1, num_rollouts * per_rollout or num_tokens))

    @torch.no_grad()
    def score(self, batch: RolloutBatch, *, max_tokens: int, reused: bool) -> None:
        """Write the trainer's own logprobs on the rollouts, once, before advantages and the first update.

        Args:
            batch: this rank's rollouts.
            max_tokens: token budget of a micro-batch.
            reused: more than one update will use these rollouts, so the policy of before the first must be remembered.
        """
        models = [("scored_logprobs", self.policy)] if reused else []
        models += [("ref_logprobs", self.reference)] if self.reference is not None else []
        if not models:
            return
        for part in plan_micro_batches(batch.rollouts, max_tokens):
            micro = pack(part, temperature=batch.temperature).to(self.device)
            for name, model in models:
                logprobs = self.policy_forward(model, micro)[0].cpu()
                pieces = logprobs.split([len(r.completion_ids) for r in part])
                for rollout, piece in zip(part, pieces, strict=True):
                    setattr(rollout, name, piece.clone())

    # -- Lightning ----------------------------------------------------------------------------------------------------

    def training_step(self, batch: StepBatch, batch_idx: int) -> Tensor:
        """One optimizer step: every micro-batch but the last runs its backward here, the last one's is Lightning's."""
        strategy: Any = self.trainer.strategy
        self.trainer.optimizers[0].zero_grad()
        meter, before = Meter(), torch.zeros((), device=self.device)
        for micro in batch.micro[:-1]:
            loss = self._micro_loss(micro, meter, last=False)
            strategy.backward(loss, None)
            before += loss.detach()
        loss = self._micro_loss(batch.micro[-1], meter, last=True) + before
        meter.add("train/loss", loss)
        self._log(batch, meter)
        return loss

    def _micro_loss(self, micro: MicroBatch, meter: Meter, *, last: bool) -> Tensor:
        strategy: Any = self.trainer.strategy
        if hasattr(strategy, "sync_gradients"):
            strategy.sync_gradients(last)
        logprobs, entropy = self.policy_forward(self.policy, micro)
        loss, metrics = self.loss(micro, logprobs)
        meter.add_all(metrics, micro.loss_mask)
        meter.add("train/entropy", entropy, mask=micro.loss_mask)
        old = logprobs.detach() if micro.old_logprobs is None else micro.old_logprobs
        meter.add("kl/mismatch", kl.k3(micro.rollout_logprobs, old), mask=micro.loss_mask)
        if self.reference is not None and micro.ref_logprobs is not None:  # an idle rollout has some in any case
            meter.add("kl/ref", kl.k3(logprobs.detach(), micro.ref_logprobs), mask=micro.loss_mask)
        return loss * self.trainer.world_size  # data parallelism averages gradients over ranks

    def _log(self, batch: StepBatch, meter: Meter) -> None:
        now = time.perf_counter()
        seconds, self._step_started = now - self._step_started, now
        tokens = sum(len(m.input_ids) for m in batch.micro)
        meter.add_sum("perf/tokens_per_second", tokens * self.trainer.world_size, seconds)
        for name, (total, count) in batch.measured.items():
            meter.add_sum(name, total, count)
        shown = {"reward/mean", "kl/mismatch", "kl/ref", "perf/tokens_per_second"}
        for name, value in meter.means(all_sum).items():
            self.log(name, value, on_step=True, on_epoch=False, prog_bar=name in shown, batch_size=1)

    def on_train_batch_start(self, batch: StepBatch, batch_idx: int) -> None:
        """Start the clock of ``time/train_step``: the whole optimizer step, without making the rollouts."""
        self._batch_started = time.perf_counter()

    def on_train_batch_end(self, outputs: Any, batch: StepBatch, batch_idx: int) -> None:
        """Stop it."""
        seconds = time.perf_counter() - self._batch_started
        self.log("time/train_step", seconds, on_step=True, on_epoch=False, batch_size=1)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        """Nothing: Lightning calls it after ``training_step``, where it would wipe the micro-batches already summed."""

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip as the Trainer says, and log ``train/grad_norm``: the norm before clipping, over all ranks."""
        grads = [p.grad for p in self.policy.parameters() if p.grad is not None]
        norm: Any = torch.nn.utils.get_total_norm(grads)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        self.log("train/grad_norm", norm, on_step=True, on_epoch=False, batch_size=1)
        self.clip_gradients(
            optimizer, gradient_clip_val=gradient_clip_val, gradient_clip_algorithm=gradient_clip_algorithm
        )

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

    def configure_optimizers(self) -> Any:
        """AdamW, without decay on vectors, and the learning rate's schedule by optimizer step."""
        trained = [p for p in self.policy.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": self.weight_decay},
            {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(
            [g for g in groups if g["params"]], lr=self.lr, betas=self.betas, fused=self.device.type == "cuda"
        )
        if self.schedule == "constant" and not self.warmup_steps:
            return optimizer
        total = self.trainer.estimated_stepping_batches if self.schedule != "constant" else None
        factor = schedule_factor(self.schedule, self.warmup_steps, total)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
