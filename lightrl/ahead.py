"""A rank's share of the rollouts that a producer samples ahead of training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightrl.distributed import all_objects, from_rank_zero, rank, world_size
from lightrl.environments.ahead import EpisodesAhead
from lightrl.producer import Produced, RolloutProducer, Work
from lightrl.types import Prompt, RolloutBatch, RolloutGroup

if TYPE_CHECKING:
    from lightrl.stream import RolloutStream


class RolloutsAhead:
    """Starts the producer on rank 0 at the first batch, and deals out what it hands over.

    Args:
        stream: whose prompts, order and settings are used.
    """

    def __init__(self, stream: RolloutStream) -> None:
        self._stream = stream
        self._producer: RolloutProducer | None = None
        self._resumed: dict[str, Any] | None = None

    def next_batch(self) -> tuple[RolloutBatch, RolloutBatch]:
        """Return this rank's share of the next batch, and of all that was sampled for it (a collective)."""
        data = self._stream.data
        strategy: Any = data.trainer.strategy  # type: ignore[union-attr]
        with strategy.phase("generate"):
            produced: Produced = from_rank_zero(self._next)
        if missing := data.prompts_per_step - len(produced.groups):
            self._stream.warn_of_few(missing)
        groups, refused = (g[rank() :: world_size()] for g in (produced.groups, produced.refused))
        for group_id, group in enumerate(groups):
            for rollout in group.rollouts:
                rollout.group_id = group_id
        sampled = [*groups, *refused]
        oldest = [int(r.policy_versions.min()) for g in groups for r in g.rollouts if len(r.policy_versions)]
        version = min(all_objects(min(oldest, default=strategy.policy_version)))
        seconds = {"time/wait": produced.waited}
        if "time/weight_sync" in strategy.seconds:
            seconds["time/weight_sync"] = strategy.seconds["time/weight_sync"]
        batch = RolloutBatch(groups, version, data.temperature, seconds, data.max_completion_tokens)
        return batch, RolloutBatch(sampled, version, data.temperature, seconds, data.max_completion_tokens)

    def _next(self) -> Produced:
        if self._producer is None:
            stream = self._stream
            strategy: Any = stream.data.trainer.strategy  # type: ignore[union-attr]
            self._producer = strategy.produce(
                self._work(), stream.data.prompts_per_step, stream.steps_per_rollout, self._resumed
            )
            self._resumed = None
        return self._producer.next_batch()

    def _work(self) -> Work:
        stream, module = self._stream, self._stream.module
        assert stream.order is not None
        rounds = module.max_sampling_rounds
        return Work(
            prompts=stream.prompts,
            order=stream.order,
            sampling=stream.sampling_of_training(),
            seed=stream.seed,
            deterministic=stream.data.deterministic,
            score=self._score,
            episodes=self._episodes(),
            keep=module.keep_group if rounds > 1 else lambda group: True,
            most_refused=(rounds - 1) * stream.data.prompts_per_step,
        )

    def _episodes(self) -> EpisodesAhead | None:
        data = self._stream.data
        if data.episodes is None:
            return None
        assert data.tokenizer is not None
        return EpisodesAhead(data.episodes, data.tokenizer, data.chat_arguments, self._stream.sampling_of_training())

    def _score(self, prompts: list[Prompt], sampled: list[list[Any]]) -> list[RolloutGroup]:
        return self._stream.source().graded(prompts, sampled)

    def state_dict(self) -> dict[str, Any] | None:
        """Return the producer's state, of rank 0, on every rank (all ranks call it together)."""
        states: list[dict[str, Any] | None] = all_objects(
            self._producer.state_dict() if self._producer is not None else self._resumed
        )
        return states[0]

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Have the producer go on from ``state``."""
        self._resumed = state
