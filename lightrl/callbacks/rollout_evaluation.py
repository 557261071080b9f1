"""Held-out metrics from several samples of each validation prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback
from torchmetrics import Metric, SumMetric
from typing_extensions import override

from lightrl.evaluation import MajorityAtK, MeanAtK, PassAtK
from lightrl.rewards.base import import_callable
from lightrl.types import Rollout, RolloutBatch, Sampling

if TYPE_CHECKING:
    import lightning.pytorch as pl


class RolloutEvaluation(Callback):
    """Has validation sample each prompt several times, its own way, and logs mean@k, pass@k and maj@k.

    The live engine samples, with the weights that it holds for training. Logged are ``val/mean@N`` over all N samples,
    ``val/pass@K`` and ``val/maj@K`` for each K (:mod:`lightrl.evaluation`), and the counts behind them,
    ``val/num_prompts`` and ``val/num_completions`` (scored ones).

    Args:
        k: of pass@k and maj@k; several make several metrics.
        samples: completions of each prompt; None: the largest k.
        temperature: of these samples; 0, which takes the likeliest token, makes sense for one sample only.
        top_p: share of the likeliest tokens to sample from.
        top_k: number of the likeliest tokens to sample from; 0: all.
        min_p: least probability of a token, as a share of the likeliest one's.
        max_completion_tokens: longest completion; None: as in training.
        threshold: the reward from which a completion is right.
        term: the name of the reward that says whether it is right; None: their weighted sum.
        answer: takes the answer to vote on from a completion (None: no vote), or the import path of such a function,
            for example ``"lightrl.rewards.boxed_answer"``; None: the whole completion.

    Raises:
        ValueError: a ``k`` is below 1 or above ``samples``, several samples are to be taken at temperature 0, a
            Trainer has two of these callbacks, or its datamodule has no validation prompts.
    """

    def __init__(
        self,
        k: int | list[int] = 8,
        samples: int | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        max_completion_tokens: int | None = None,
        threshold: float = 1.0,
        term: str | None = None,
        answer: str | Callable[[str], str | None] | None = None,
    ) -> None:
        ks = [k] if isinstance(k, int) else sorted(set(k))
        if not ks:
            raise ValueError("k=[]: name at least one, such as k=8")
        self.samples = max(ks) if samples is None else samples
        if max(ks) > self.samples:
            raise ValueError(
                f"k={max(ks)} is more than samples={self.samples}: pass@k and maj@k need at least k samples of each "
                f"prompt. Raise samples, or lower k"
            )
        if temperature == 0 and self.samples > 1:
            raise ValueError(
                f"temperature=0 takes the likeliest token: {self.samples} samples would be copies of one. Use k=1, or "
                "a temperature above 0"
            )
        self.sampling: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
        self.max_completion_tokens, self.term = max_completion_tokens, term
        self.answer: Any = import_callable(answer, "answer") if isinstance(answer, str) else answer or str.strip
        self.means = {f"mean@{self.samples}": MeanAtK()}
        self.passes = {f"pass@{k}": PassAtK(k, threshold) for k in ks}
        self.votes = {f"maj@{k}": MajorityAtK(k, threshold) for k in ks}
        self.counts = {"num_prompts": SumMetric(), "num_completions": SumMetric()}

    @property
    def metrics(self) -> dict[str, Metric]:
        """Every metric by name, without ``val/``."""
        return {**self.means, **self.passes, **self.votes, **self.counts}

    def validation_sampling(self, sampling: Sampling) -> Sampling:
        """Return how validation prompts are sampled, of how the datamodule would sample them."""
        longest = self.max_completion_tokens or sampling.max_completion_tokens
        return replace(sampling, num_completions=self.samples, max_completion_tokens=longest, **self.sampling)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        twins = [c for c in trainer.callbacks if isinstance(c, RolloutEvaluation)]  # type: ignore[attr-defined]
        if len(twins) > 1:
            raise ValueError(
                f"{len(twins)} RolloutEvaluation callbacks: they share the samples of one validation. Use one, with "
                "k=[...] for several k"
            )
        data = getattr(trainer, "datamodule", None)
        if getattr(data, "val_prompts", "another kind's own") is None:
            raise ValueError(
                "RolloutEvaluation has nothing to evaluate on: give RolloutDataModule val_prompts=, or leave it out"
            )

    @override
    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for metric in self.metrics.values():
            metric.to(pl_module.device).reset()

    @override
    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: RolloutBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        rewards = [[r.reward for r in group.rollouts] for group in batch.groups]
        right = [[self._correctness(r) for r in group.rollouts] for group in batch.groups]
        answers = [[self.answer(r.text) for r in group.rollouts] for group in batch.groups]
        for mean in self.means.values():
            mean.update(rewards)
        for passed in self.passes.values():
            passed.update(right)
        for vote in self.votes.values():
            vote.update(right, answers)
        scored = [sum(r is not None for r in row) for row in rewards]
        self.counts["num_prompts"].update(sum(n > 0 for n in scored))
        self.counts["num_completions"].update(sum(scored))

    def _correctness(self, rollout: Rollout) -> float | None:
        if self.term is None:
            return rollout.reward
        if self.term not in rollout.reward_terms:
            raise ValueError(f"term={self.term!r} is no reward's name: there are {', '.join(rollout.reward_terms)}")
        return rollout.reward_terms[self.term]

    @override
    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for name, metric in self.metrics.items():
            if metric.update_called and not (value := metric.compute()).isnan():
                # Equal on all ranks already; without sync_dist Lightning would warn that it may not be.
                pl_module.log(f"val/{name}", value.float(), on_step=False, on_epoch=True, batch_size=1, sync_dist=True)
