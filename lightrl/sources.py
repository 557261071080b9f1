"""Where rollouts come from: the strategy samples, rewards score, the module adds logprobs and advantages."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from lightrl.distributed import all_objects, world_size
from lightrl.groups import has_spread
from lightrl.rewards import RewardSum, Score
from lightrl.types import Completion, Prompt, Rollout, RolloutBatch, RolloutGroup, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lightrl.strategies import RolloutStrategy


class RolloutSource:
    """Turns prompts into scored groups of rollouts, on this rank.

    Args:
        strategy: samples completions.
        tokenizer: decodes them, for rewards and for people.
        rewards: scores them.
    """

    def __init__(
        self, strategy: RolloutStrategy, tokenizer: PreTrainedTokenizerBase, rewards: RewardSum | None
    ) -> None:
        self.strategy, self.tokenizer, self.rewards = strategy, tokenizer, rewards
        self._generated = 0.0  # when the last completion had come

    def rollout(self, prompts: list[Prompt], sampling: Sampling) -> RolloutBatch:
        """Sample and score. All ranks call it together, each with its own prompts (perhaps none)."""
        groups = graded(*self.sample(prompts, sampling))
        seconds = self.strategy.seconds | {"time/reward": time.perf_counter() - self._generated}
        version, longest = self.strategy.policy_version, sampling.max_completion_tokens
        return RolloutBatch(groups, version, sampling.temperature, seconds, longest)

    def sample(self, prompts: list[Prompt], sampling: Sampling) -> tuple[list[RolloutGroup], list[Score]]:
        """Return one group for each prompt, and one score for each rollout in them."""
        completions = self.strategy.generate([p.token_ids for p in prompts], sampling)
        self._generated = time.perf_counter()
        return self._scored(prompts, completions)

    def graded(self, prompts: list[Prompt], sampled: list[list[Any]]) -> list[RolloutGroup]:
        """Return groups of scored rollouts of the completions that were sampled, one for each prompt; no collective."""
        return graded(*self._scored(prompts, sampled))

    def _scored(
        self, prompts: list[Prompt], completions: list[list[Completion]]
    ) -> tuple[list[RolloutGroup], list[Score]]:
        texts = self._decode([c.token_ids for group in completions for c in group])
        owners = [p for p, group in zip(prompts, completions, strict=True) for _ in group]
        assert self.rewards is not None
        with self.strategy.phase("reward"):
            scores = self.rewards.score(texts, owners, [c.token_ids for group in completions for c in group])
        return as_groups(prompts, completions, texts), scores

    def require_scores(self, batch: RolloutBatch) -> None:
        """Raise ValueError if no rollout on any rank has a reward and no reward failed (a collective)."""
        mine = (sum(r.reward is not None for r in batch), len(batch), self._failures)
        scored, total, failed = (sum(column) for column in zip(*all_objects(mine), strict=True))
        if total and not scored and not failed:
            names = ", ".join(repr(name) for name in self._names)
            raise ValueError(
                f"none of {total} completions has a reward: {names} returned None for each, which means 'I abstain'. "
                "Return a number (is a `return` missing?)"
            )

    @property
    def _failures(self) -> int:
        return sum(self.rewards.failures.values()) if self.rewards is not None else 0

    @property
    def _names(self) -> list[str]:
        return [term.name for term in self.rewards.terms] if self.rewards is not None else []

    def _decode(self, ids: list[list[int]]) -> list[str]:
        return self.tokenizer.batch_decode(ids, skip_special_tokens=True) if ids else []


def as_groups(prompts: list[Prompt], completions: list[list[Completion]], texts: list[str]) -> list[RolloutGroup]:
    """Return what was sampled of each prompt as a group of rollouts; ``texts`` has one for each completion."""
    rest = iter(texts)
    return [
        RolloutGroup(prompt, [_rollout(prompt, c, next(rest), group_id) for c in group])
        for group_id, (prompt, group) in enumerate(zip(prompts, completions, strict=True))
    ]


def _rollout(prompt: Prompt, completion: Completion, text: str, group_id: int) -> Rollout:
    return Rollout(
        prompt_ids=prompt.token_ids,
        completion_ids=completion.token_ids,
        rollout_logprobs=completion.logprobs,
        policy_versions=completion.policy_versions,
        truncated=completion.truncated,
        text=text,
        group_id=group_id,
    )


def graded(groups: list[RolloutGroup], scores: list[Score]) -> list[RolloutGroup]:
    """Return the groups with a score in each of their rollouts."""
    rollouts = [r for group in groups for r in group.rollouts]
    for rollout, score in zip(rollouts, scores, strict=True):
        rollout.reward, rollout.reward_terms = score.total, score.terms
    return groups


def measure(batch: RolloutBatch, version_now: int) -> dict[str, tuple[float, float]]:
    """Return (sum, count) on this rank of each metric of a rollout batch (a collective).

    Args:
        batch: scored rollouts.
        version_now: optimizer steps done.
    """
    rollouts = batch.rollouts
    rewards = [r.reward for r in rollouts if r.reward is not None]
    spreads = [_spread(g) for g in batch.groups]
    ages = [version_now - int(r.policy_versions.min()) for r in rollouts if len(r.policy_versions)]
    measured: dict[str, Any] = {
        "reward/mean": (sum(rewards), len(rewards)),
        "reward/std": (sum(spreads), len(spreads)),
        "reward/zero_std_frac": (sum(s == 0 for s in spreads), len(spreads)),
        "reward/excluded_frac": (len(rollouts) - len(rewards), len(rollouts)),
        "rollout/num_completions": (len(rollouts), 1 / world_size()),
        "rollout/length_mean": (sum(len(r.completion_ids) for r in rollouts), len(rollouts)),
        "rollout/truncated_frac": (sum(r.truncated for r in rollouts), len(rollouts)),
        "rollout/staleness_mean": (sum(ages), len(ages)),
    }
    terms = sorted({name for r in rollouts for name in r.reward_terms})
    for name in terms if len(terms) > 1 else ():
        values = [v for r in rollouts if (v := r.reward_terms.get(name)) is not None]
        measured[f"reward/{name}"] = (sum(values), len(values))
    counts = [(r.turns, len(r.completion_ids)) for r in rollouts] or [(0, 0)]
    most = all_objects((max(ages, default=0), *map(max, zip(*counts, strict=True))))
    oldest, most_turns, longest = (max(column) for column in zip(*most, strict=True))
    measured["rollout/staleness_max"], measured["rollout/length_max"] = (oldest, 1), (longest, 1)
    if most_turns > 1:  # on any rank: all must have the same names
        measured["rollout/turns_mean"] = (sum(r.turns for r in rollouts), len(rollouts))
    measured |= {name: (value, 1) for name, value in batch.seconds.items()}
    return {name: (float(total), float(count)) for name, (total, count) in measured.items()}


def _spread(group: RolloutGroup) -> float:
    rewards = torch.tensor([r for r in group.rewards if r is not None], dtype=torch.float64)
    if len(rewards) < 2 or not has_spread(rewards.min(), rewards.max()):
        return 0.0
    return float(rewards.std())
