"""The stream of optimizer steps: which prompts come next, and how their rollouts are cut into steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities import rank_zero_warn

from lightrl.ahead import RolloutsAhead
from lightrl.distributed import all_objects, rank, world_size
from lightrl.environments.source import EpisodeSource
from lightrl.moves import even_out
from lightrl.packing import StepBatch, live_tokens, shuffled_parts
from lightrl.prompts import CurriculumOrder, MixedOrder, PromptOrder, stop_token_ids
from lightrl.rng import derive_seed
from lightrl.rollout_state import deal_anew, deal_sums_anew, rollouts_from_state, rollouts_to_state
from lightrl.sources import RolloutSource, measure
from lightrl.types import Prompt, Rollout, RolloutBatch, RolloutGroup, Sampling

if TYPE_CHECKING:
    from lightrl.datamodule import RolloutDataModule


class RolloutStream:
    """Samples rollout batches and hands out the optimizer steps they are used for.

    Args:
        data: whose settings, trainer, tokenizer and rewards are used.
        prompts: training prompts (may be none: only validation).
        seed: of order and sampling.
    """

    def __init__(self, data: RolloutDataModule, prompts: list[Prompt], seed: int) -> None:
        self.data, self.prompts, self.seed = data, prompts, seed
        self.order = self._make_order() if prompts else None
        self.batches = 0
        """Rounds of sampling used up: one for each rollout batch, more where groups were replaced."""
        self.step = 0
        """Optimizer steps handed out of the current batch."""
        self.current: RolloutBatch | None = None
        self.measured: dict[str, tuple[float, float]] = {}
        """(sum, count) on this rank of each metric of the current batch: every step that it is used for logs them."""
        self._ahead = RolloutsAhead(self)
        self._warned = False

    def _make_order(self) -> PromptOrder | MixedOrder:
        data = self.data
        if data.curriculum is not None:
            return CurriculumOrder(self.prompts, self.seed, data.curriculum)
        if len(data.sources) > 1:
            sizes, weights = zip(*data.sources, strict=True)
            return MixedOrder(sizes, weights, self.seed, data.shuffle)
        return PromptOrder(len(self.prompts), self.seed, data.shuffle)

    @property
    def steps_per_rollout(self) -> int:
        """Optimizer steps that each rollout batch is used for."""
        return self.data.epochs_per_rollout * self.data.minibatches_per_rollout

    def next_step(self) -> StepBatch:
        """Return the next optimizer step's rollouts, sampling new ones when the current batch is used up."""
        self._trainer.strategy.sync_weights()
        if self.current is None:
            self.current, self.measured = self._collect()
        batch = self.current
        trained = [r for r in batch.rollouts if self.module.trains_on(r)]
        if self.steps_per_rollout > 1:
            count = self.data.minibatches_per_rollout
            round_, part = divmod(self.step, count)
            seed = derive_seed(self.seed, "minibatch", self.batches, round_, rank())
            trained = shuffled_parts(trained, count, seed)[part]
        times_used = self.step
        # Before the step is handed out: a checkpoint after it must go on with the next one.
        self.step += 1
        if self.step == self.steps_per_rollout:
            self.current, self.step = None, 0
            self.batches += 1
        step = self._step_batch(trained, batch, times_used)
        # Old is current: scored in other micro-batches it would differ by rounding, in bfloat16 visibly.
        if not times_used:
            step.micro = [replace(m, old_logprobs=None) for m in step.micro]
        return step

    def _collect(self) -> tuple[RolloutBatch, dict[str, tuple[float, float]]]:
        module, before = self.module, self.batches
        if self._trainer.strategy.overlaps:
            batch, sampled = self._ahead.next_batch()
        else:
            batch = sampled = self._sample(range(self.data.prompts_per_step))
        if self.batches == 0:  # later on, a whole batch of abstentions may be meant
            self.source().require_scores(sampled)
        if module.max_sampling_rounds > 1 and not self._trainer.strategy.overlaps:
            batch, sampled = self._replaced(batch)
        packer = module.policy_forward.packer(module.policy)
        evened = even_out(batch.groups, lambda g: packer.load([r for r in g.rollouts if module.trains_on(r)]))
        batch = replace(batch, groups=evened)
        max_tokens = self.data.max_tokens_per_micro_batch
        with self._trainer.strategy.phase("score"):
            module.score(batch, max_tokens=max_tokens, reused=self.steps_per_rollout > 1)
        module.advantages(batch)
        measured = measure(sampled, self._trainer.global_step)
        if module.max_sampling_rounds > 1 and not self._trainer.strategy.overlaps:
            measured["rollout/sampling_rounds"] = (1.0 + self.batches - before, 1.0)
        return batch, measured

    def sampling_of_training(self) -> Sampling:
        """How rollouts to train on are sampled."""
        return self._sampling("train", self.batches, self.data.group_size, self.data.temperature, ()).for_training()

    def _sample(self, places: Sequence[int]) -> RolloutBatch:
        """Sample the next prompts in the order, one for each place in the step; a place belongs to a rank."""
        data = self.data
        assert self.order is not None
        rows = dict(zip(places, self.order.take(len(places)), strict=True))
        mine = [p for p in places if p % world_size() == rank()]
        sampling = self._sampling("train", self.batches, data.group_size, data.temperature, mine).for_training()
        batch = self.source().rollout([self.prompts[rows[p]] for p in mine], sampling)
        if isinstance(self.order, CurriculumOrder):
            means = [(rows[p], group.mean_reward) for p, group in zip(mine, batch.groups, strict=True)]
            for theirs in all_objects({row: mean for row, mean in means if mean is not None}):
                self.order.note(theirs)
        return batch

    def _replaced(self, batch: RolloutBatch) -> tuple[RolloutBatch, RolloutBatch]:
        """Return the batch with the groups that the module refuses replaced, and one of all that was sampled.

        Metrics are of the latter: the rewards of what was kept say nothing of the policy.
        """
        module, places = self.module, range(rank(), self.data.prompts_per_step, world_size())
        sampled = replace(batch, groups=list(batch.groups), seconds=dict(batch.seconds))
        kept = {p: g for p, g in zip(places, batch.groups, strict=True) if module.keep_group(g)}
        for _ in range(module.max_sampling_rounds - 1):
            missing = self._missing(places, kept)
            if not missing:
                break
            self.batches += 1  # another seed
            again = self._sample(missing)
            asked = [p for p in missing if p in places]
            kept |= {p: g for p, g in zip(asked, again.groups, strict=True) if module.keep_group(g)}
            sampled.groups += again.groups
            sampled.seconds = {name: sampled.seconds[name] + seconds for name, seconds in again.seconds.items()}
        if missing := self._missing(places, kept):
            self.warn_of_few(len(missing))
        batch.groups = [kept[p] for p in places if p in kept]
        for group_id, group in enumerate(batch.groups):
            for rollout in group.rollouts:
                rollout.group_id = group_id
        return batch, sampled

    def _missing(self, places: Sequence[int], kept: dict[int, RolloutGroup]) -> list[int]:
        """Places on any rank without a group (a collective): every rank comes to the same end of the rounds."""
        return sorted(p for theirs in all_objects([p for p in places if p not in kept]) for p in theirs)

    def warn_of_few(self, missing: int) -> None:
        """Say once that places of a step stay empty."""
        if not self._warned:
            rank_zero_warn(
                f"after max_sampling_rounds={self.module.max_sampling_rounds} {missing} of "
                f"{self.data.prompts_per_step} prompts have no group to train on: the step goes on without them. "
                "Prompts may be too easy or too hard. (This is said once.)"
            )
        self._warned = True

    def _step_batch(self, rollouts: list[Rollout], batch: RolloutBatch, times_used: int) -> StepBatch:
        counts = [live_tokens([r]) for r in rollouts]
        everywhere = all_objects((sum(counts), sum(c > 0 for c in counts)))
        tokens, sequences = (sum(column) for column in zip(*everywhere, strict=True))
        denominator = self.module.denominator(tokens, sequences, self.data.max_completion_tokens)
        packer = self.module.policy_forward.packer(self.module.policy)
        parts = packer.plan(rollouts, self.data.max_tokens_per_micro_batch)
        micro = [packer.pack(part, temperature=batch.temperature, denominator=denominator) for part in parts]
        return StepBatch(micro, batch.policy_version, rollouts, times_used, self.measured)

    def validation_batch(self, prompts: list[Prompt], i: int, size: int) -> RolloutBatch:
        """Return batch ``i``, of ``size`` prompts on each rank: every prompt is in one batch on one rank."""
        share = range(rank(), len(prompts), world_size())[i * size : (i + 1) * size]
        sampling = self._sampling("val", i, self.data.val_group_size, self.data.val_temperature, ())
        if self.data.deterministic:  # by prompt: the same samples in batches of any size, on any number of ranks
            sampling = replace(sampling, prompt_seeds=tuple(derive_seed(self.seed, "val", j) for j in share))
        sampling = for_validation(self._trainer, sampling)
        return self.source().rollout([prompts[j] for j in share], sampling)

    def _sampling(self, kind: str, batch: int, n: int, temperature: float, places: Sequence[int]) -> Sampling:
        tokenizer, policy = self.data.tokenizer, self.module.policy
        assert tokenizer is not None
        seed = derive_seed(self.seed, kind, batch)
        return Sampling(
            max_completion_tokens=self.data.max_completion_tokens,
            num_completions=n,
            temperature=temperature,
            stop_token_ids=stop_token_ids(tokenizer, policy.generation_config, policy.config),
            seed=seed,
            prompt_seeds=tuple(derive_seed(seed, i) for i in places) if self.data.deterministic else (),
        )

    def source(self) -> RolloutSource:
        """Return what samples and scores."""
        assert self.data.tokenizer is not None
        strategy, tokenizer, rewards = self._trainer.strategy, self.data.tokenizer, self.data.rewards
        if self.data.episodes is None:
            return RolloutSource(strategy, tokenizer, rewards)
        patience = self.data.prompts_per_step * self.data.group_size
        return EpisodeSource(strategy, tokenizer, rewards, self.data.episodes, self.data.chat_arguments, patience)

    @property
    def _trainer(self) -> Any:
        return self.data.trainer

    @property
    def module(self) -> Any:
        """The module that is trained."""
        return self._trainer.lightning_module

    def state_dict(self) -> dict[str, Any]:
        """Return the exact position, of every rank, as plain builtins and tensors (all ranks call it together)."""
        if self.order is None:
            return {}
        ahead = self._ahead.state_dict()
        return {
            "order": ahead["order"] if ahead else self.order.state_dict(),
            "batches": self.batches,
            "step": self.step,
            "current": all_objects(rollouts_to_state(self.current)),
            "measured": all_objects(self.measured),
            "ahead": ahead,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken; on another number of ranks groups are dealt out anew, with a warning."""
        if not state or self.order is None:
            return
        self.order.load_state_dict(state["order"])
        ahead = state.get("ahead")
        self._ahead.load_state_dict(ahead)
        if ahead and not self._trainer.strategy.overlaps:
            rank_zero_warn(
                f"the checkpoint is of a strategy that samples ahead: {len(ahead['rows'])} prompts that were under way "
                "are passed over. Resume with strategy='async_vllm' to train on them"
            )
        self.seed = self.order.seed
        self.batches, self.step = state["batches"], state["step"]
        current, measured = state["current"], state.get("measured") or [{}]
        if len(current) != world_size():
            current, measured = deal_anew(current, world_size()), deal_sums_anew(measured, world_size())
            if any(c is not None for c in current):
                rank_zero_warn(
                    f"the checkpoint is in the middle of a rollout batch of {len(state['current'])} ranks and the run "
                    f"has {world_size()}: its groups are dealt out anew, and what is left of this batch is cut into "
                    "other mini-batches than in an unbroken run. From the next batch on every prompt comes in its turn"
                )
        self.current = rollouts_from_state(current[rank()])
        self.measured = measured[rank() % len(measured)]


def for_validation(trainer: Any, sampling: Sampling) -> Sampling:
    """Return how validation prompts are sampled: a callback may have a say in it (``RolloutEvaluation`` does).

    It has none where they are predicted on, or written to a file: then the datamodule's settings hold.
    """
    for callback in () if trainer.predicting else trainer.callbacks:
        if hasattr(callback, "validation_sampling"):
            sampling = callback.validation_sampling(sampling)
    return sampling
