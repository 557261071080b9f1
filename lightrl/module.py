"""The algorithm: what a loss and advantages are, and everything that a user overrides."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightrl import advantages as estimators
from lightrl import kl
from lightrl.arguments import check_betas, check_choice, check_correction, check_count, check_numbers
from lightrl.corrections import Correction, approximate_proximal
from lightrl.finite import check_rewarded_logprobs
from lightrl.losses import MODES, Terms, aggregate, clipped_policy_terms
from lightrl.models import ModelsModule
from lightrl.optim import SCHEDULES
from lightrl.packing import MicroBatch
from lightrl.types import Rollout, RolloutBatch, RolloutGroup

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class RLModule(ModelsModule):
    """GRPO (DeepSeekMath, arXiv:2402.03300) on any Hugging Face causal language model. Override ``loss`` to change it.

    Smaller pieces to override: ``estimate`` (advantages from rewards), ``rewards`` (what they are made of) and
    ``policy_terms`` (the loss of a token). :mod:`lightrl.algorithms` has the field's estimators and losses.

    Args:
        model: folder, hub name, or a ``PreTrainedModel`` (its parameters in float32).
        lr: peak learning rate of AdamW.
        betas: AdamW's.
        weight_decay: AdamW's, on matrices only.
        warmup_steps: optimizer steps over which the learning rate rises from 0.
        schedule: ``"constant"``, ``"linear"`` or ``"cosine"`` (the latter two fall to 0 at the run's end).
        clip_ratio_low: the ratio to the old policy counts down to ``1 - clip_ratio_low``.
        clip_ratio_high: and up to ``1 + clip_ratio_high``.
        kl_coef: weight of the KL to the frozen initial policy; above 0 a second copy of the model is kept, but with
            LoRA, where the reference is the policy without its adapters.
        kl_in_reward: take the KL, summed over a completion (k1), from its reward instead of adding it to the loss.
        entropy_coef: weight of the entropy bonus: the loss is less by it times the policy's entropy.
        scale_rewards: divide a group's advantages by its standard deviation (GRPO) or not (Dr. GRPO).
        aggregation: ``"token"`` (mean over all tokens of the step), ``"sequence"`` (mean over sequences of their token
            means) or ``"constant"`` (sum over tokens / (sequences x longest allowed completion)).
        mask_truncated: leave completions that the token budget ended out of the loss, above and below the line; their
            rewards still count in their group's baseline.
        correction: weights for the gap between sampler and trainer, such as
            :class:`lightrl.corrections.TruncatedToken`; they multiply the policy's loss terms, not KL or entropy. It is
            not saved in checkpoints: give it to ``load_from_checkpoint`` again.
        recompute_old_logprobs: where rollouts are used more than once, run the model over them before the first update;
            False saves the pass and interpolates by age (:func:`lightrl.corrections.approximate_proximal`).
        packed: lay sequences end to end without padding; None: where the model's attention allows it, which is tried
            out at the first use.
        share_prefix: where sequences are packed, what those of a group begin with (the prompt) passes through the model
            once in each micro-batch.
        lora: train adapters on frozen weights (arXiv:2106.09685): a ``peft.LoraConfig`` or a dict of its arguments,
            such as ``{"r": 16}`` (all linear modules but the head). Checkpoints then hold the adapters alone.
        trainable: train only the parameters in whose names one of these regular expressions is found.
        quantize: ``"4bit"`` keeps the base of a LoRA in 4 bits (QLoRA; needs bitsandbytes and a GPU).
        gradient_checkpointing: compute activations again in the backward pass instead of keeping them.
        torch_compile: compile the decoder layers.
        optimizer: ``"adamw"``; ``"adamw_offload"`` (its state in CPU memory, which costs time); with bitsandbytes, on
            one GPU, ``"adamw_8bit"``, ``"paged_adamw"`` or ``"paged_adamw_8bit"``.
        reference_device: ``"cpu"`` keeps a reference copy in CPU memory and brings one layer at a time.
        ref_refresh_every: the reference becomes the current policy after so many optimizer steps, at the next rollout
            batch; checkpoints then hold it too. 0: never.
        trust_remote_code: run code that comes with the model.
        on_nonfinite: what becomes of a step with NaN or inf in its loss or gradient: ``"raise"`` ends the run, weights
            untouched, and writes what the step was made of to a file in the Trainer's ``default_root_dir``; ``"skip"``
            goes on without it and counts ``train/skipped_steps``.

    Raises:
        ValueError: an argument is out of range, or needs a library that is not installed.
    """

    min_group_size = 2
    """A baseline from the group needs two completions of each prompt."""
    max_sampling_rounds = 1
    """How often at most a step samples to replace groups that ``keep_group`` refuses; 1 asks about none."""

    def __init__(
        self,
        model: PreTrainedModel | str | Path,
        lr: float = 1e-6,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        schedule: str = "constant",
        clip_ratio_low: float = 0.2,
        clip_ratio_high: float = 0.2,
        kl_coef: float = 0.0,
        kl_in_reward: bool = False,
        entropy_coef: float = 0.0,
        scale_rewards: bool = True,
        aggregation: str = "token",
        mask_truncated: bool = False,
        correction: Correction | None = None,
        recompute_old_logprobs: bool = True,
        packed: bool | None = None,
        share_prefix: bool = True,
        lora: Any = None,
        trainable: str | list[str] | None = None,
        quantize: str | None = None,
        gradient_checkpointing: bool = False,
        torch_compile: bool = False,
        optimizer: str = "adamw",
        reference_device: str | None = None,
        ref_refresh_every: int = 0,
        trust_remote_code: bool = False,
        on_nonfinite: str = "raise",
    ) -> None:
        super().__init__(
            model,
            packed=packed,
            share_prefix=share_prefix,
            lora=lora,
            trainable=trainable,
            quantize=quantize,
            gradient_checkpointing=gradient_checkpointing,
            torch_compile=torch_compile,
            optimizer=optimizer,
            kl_coef=kl_coef,
            reference_device=reference_device,
            ref_refresh_every=ref_refresh_every,
            trust_remote_code=trust_remote_code,
        )
        ignored = ["correction"] if isinstance(self.model, str) else ["correction", "model"]
        self.save_hyperparameters(ignore=ignored, logger=False)
        plain = {"lora": self.lora, "model": self.model}  # a checkpoint holds builtins, not a LoraConfig or a Path
        self.hparams.update({name: value for name, value in plain.items() if name in self.hparams})
        self.lr, self.betas, self.weight_decay = lr, betas, weight_decay
        self.warmup_steps, self.schedule = warmup_steps, schedule
        self.clip_ratio_low, self.clip_ratio_high = clip_ratio_low, clip_ratio_high
        self.kl_in_reward, self.entropy_coef = kl_in_reward, entropy_coef
        self.scale_rewards, self.aggregation, self.mask_truncated = scale_rewards, aggregation, mask_truncated
        self.correction, self.recompute_old_logprobs = correction, recompute_old_logprobs
        self.on_nonfinite = on_nonfinite
        self._check_arguments()

    def _check_arguments(self) -> None:
        check_choice("aggregation", self.aggregation, MODES)
        check_choice("schedule", self.schedule, SCHEDULES)
        check_choice("on_nonfinite", self.on_nonfinite, ("raise", "skip"))
        check_count("warmup_steps", self.warmup_steps)
        check_betas(self.betas)
        check_numbers(lr=self.lr, weight_decay=self.weight_decay, kl_coef=self.kl_coef, entropy_coef=self.entropy_coef)
        check_numbers(1.0, clip_ratio_low=self.clip_ratio_low)
        if self.clip_ratio_high != float("inf"):  # which is no clip
            check_numbers(clip_ratio_high=self.clip_ratio_high)
        check_correction(self.correction)

    # -- advantages ---------------------------------------------------------------------------------------------------

    def keep_group(self, group: RolloutGroup) -> bool:
        """Tell whether to train on a scored group, or to sample another prompt (up to ``max_sampling_rounds``)."""
        return True

    def trains_on(self, rollout: Rollout) -> bool:
        """Tell whether a rollout counts in the loss and its denominator."""
        return rollout.reward is not None and not (self.mask_truncated and rollout.truncated)

    def advantages(self, batch: RolloutBatch) -> None:
        """Set ``advantage`` on every rollout of ``batch``. All ranks call it together."""
        groups = torch.tensor([r.group_id for r in batch], dtype=torch.int64)
        found = self.estimate(self.rewards(batch), groups, batch)
        if not isinstance(found, Tensor) or found.shape != groups.shape:
            got = f"shape {list(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
            raise ValueError(
                f"{type(self).__name__}.estimate returned {got}: it must be a tensor of shape [{len(groups)}], one "
                "advantage for each rollout in the order of the rewards (override advantages() for one for each token)"
            )
        for rollout, advantage in zip(batch, found.tolist(), strict=True):
            rollout.advantage = advantage

    def rewards(self, batch: RolloutBatch) -> Tensor:
        """Return what advantages are made of, [R]: rewards, less the KL with ``kl_in_reward``; NaN where unscored."""
        rewards = torch.tensor([float("nan") if r.reward is None else r.reward for r in batch], dtype=torch.float64)
        if self.kl_in_reward and self.kl_coef > 0:
            check_rewarded_logprobs(batch.rollouts, self.global_step)
            rewards -= self.kl_coef * torch.tensor([_kl(r) for r in batch], dtype=torch.float64)
        return rewards

    def estimate(self, rewards: Tensor, group_ids: Tensor, batch: RolloutBatch) -> Tensor:
        """Return advantages [R] of this rank's rewards [R] (NaN: unscored) in groups [R].

        ``batch`` has the rollouts, in the same order, for estimators that look at more than the reward.
        """
        return (estimators.group_zscore if self.scale_rewards else estimators.group_mean)(rewards, group_ids)

    # -- the loss -----------------------------------------------------------------------------------------------------

    def policy_terms(self, batch: MicroBatch, logprobs: Tensor, old: Tensor) -> Terms:
        """Return the policy's loss by token, [N], and metrics by token; ``old`` is pi_old, [N]."""
        return clipped_policy_terms(
            logprobs,
            old,
            batch.advantages,
            clip_ratio_low=self.clip_ratio_low,
            clip_ratio_high=self.clip_ratio_high,
            loss_mask=batch.loss_mask,
        )

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
        old = self.proximal_logprobs(batch, logprobs)
        terms, measured = self.policy_terms(batch, logprobs, old)
        metrics: dict[str, Tensor | float] = {}
        if "clip_frac" in measured:
            metrics["train/clip_frac"] = measured["clip_frac"]
        if self.correction is not None:
            weights, measured = self.correction(batch, old)
            terms = terms * weights
            metrics |= {f"mismatch/{name}": values for name, values in measured.items() if name != "ratio"}
        if self.kl_coef > 0 and not self.kl_in_reward and batch.ref_logprobs is not None:
            terms = terms + self.kl_coef * kl.reverse_kl(logprobs, batch.ref_logprobs, old, loss_mask=batch.loss_mask)
        return self.aggregate(terms, batch), metrics

    def proximal_logprobs(self, batch: MicroBatch, logprobs: Tensor) -> Tensor:
        """Return pi_old's logprobs, [N], detached: those of before the first update on these rollouts."""
        if batch.old_logprobs is not None:
            return batch.old_logprobs
        if self.recompute_old_logprobs:  # and nothing was: this is the first update
            return logprobs.detach()
        return approximate_proximal(logprobs, batch.rollout_logprobs, self.global_step - batch.policy_versions)

    def aggregate(self, terms: Tensor, batch: MicroBatch) -> Tensor:
        """Add up per-token loss terms [N] of live tokens over the step's denominator, as ``aggregation`` says."""
        return aggregate(terms, denominator=batch.denominator, mode=self.aggregation, **batch.by_sequence())

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
        self.refresh_reference()
        passes = self.scoring_passes(reused=reused)
        if not passes:
            return
        packer = self.policy_forward.packer(self.policy)
        for part in packer.plan(batch.rollouts, max_tokens):
            micro = packer.pack(part, temperature=batch.temperature).to(self.device)
            for scored in passes:
                for name, values in scored(micro).items():
                    pieces = values.cpu().split([len(r.completion_ids) for r in part])
                    for rollout, piece in zip(part, pieces, strict=True):
                        setattr(rollout, name, piece.clone())

    def scoring_passes(self, *, reused: bool) -> list[Callable[[MicroBatch], dict[str, Tensor]]]:
        """Return what ``score`` runs on each micro-batch: each gives tensors [N] by the name of a rollout's field."""
        passes: list[Callable[[MicroBatch], dict[str, Tensor]]] = []
        if reused and self.recompute_old_logprobs:
            passes.append(lambda micro: {"scored_logprobs": self(micro)})
        if self._reference:
            passes.append(lambda micro: {"ref_logprobs": self.reference_logprobs(micro)})
        return passes


def _kl(rollout: Rollout) -> float:
    if rollout.ref_logprobs is None:
        raise ValueError("kl_in_reward needs ref_logprobs on every rollout: RLModule.score writes them")
    return float(kl.k1(rollout.old_logprobs, rollout.ref_logprobs, loss_mask=rollout.loss_mask).sum())
