"""The nouns of lightrl: what flows from prompts to the optimizer step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightrl.advantages import group_mean, group_zscore


@dataclass(slots=True)
class Prompt:
    """One prompt, tokenised once: these ids are what the engine gets and what is trained on."""

    token_ids: list[int]
    """Token ids, chat template included, P of them."""
    ground_truth: Any = None
    """What the reward compares a completion with."""
    columns: dict[str, Any] = field(default_factory=dict)
    """All columns of the data row, handed to reward functions by name."""
    index: int = 0
    """Row number in the data source."""
    text: str = ""
    """The prompt as text, for people: it is never tokenised again."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How completions are sampled. Training uses temperature and stop ids only (``for_training`` checks it)."""

    max_completion_tokens: int
    """Longest completion in tokens, its stop token included."""
    num_completions: int = 1
    """Completions for each prompt."""
    temperature: float = 1.0
    """0 means greedy, which only evaluation may use."""
    stop_token_ids: tuple[int, ...] = ()
    """A completion ends with the first of these; that token is part of it."""
    seed: int = 0
    """Seed of this one call; each rank or tensor-parallel group derives its own from it."""
    prompt_seeds: tuple[int, ...] = ()
    """One for each prompt, or none. Given, each completion has a seed of its own: slower, but what is sampled no longer
    depends on which prompts share a batch or a rank."""
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    def for_training(self) -> Sampling:
        """Return self, or raise ValueError where samples would not be of softmax(logits / temperature)."""
        if not self.temperature > 0:
            raise ValueError(
                f"temperature={self.temperature} cannot be trained on, greedy samples have no logprobs: use more than 0"
            )
        if self.top_p != 1.0 or self.top_k != 0 or self.min_p != 0.0:
            raise ValueError(
                f"top_p={self.top_p}, top_k={self.top_k}, min_p={self.min_p}: training samples from the whole "
                "distribution (top_p=1, top_k=0, min_p=0), or logprobs would be of another one. Evaluation takes any."
            )
        return self


@dataclass(slots=True)
class Completion:
    """What an engine returns for one sample: C tokens with the logprobs of the distribution they were drawn from."""

    token_ids: list[int]
    """C token ids, the stop token included."""
    logprobs: Tensor
    """float32 [C]: log softmax(logits / temperature) at each sampled token."""
    policy_versions: Tensor
    """int64 [C]: optimizer steps done by the weights that sampled each token."""
    truncated: bool
    """True where the token budget ended it, False where a stop token did."""


@dataclass(slots=True)
class Rollout:
    """One completion with its prompt, reward and logprobs.

    Example:
        >>> r = Rollout([5, 6], [7, 2], torch.tensor([-0.1, -0.2]))
        >>> r.token_ids.tolist(), r.old_logprobs.tolist() == r.rollout_logprobs.tolist()
        ([5, 6, 7, 2], True)
    """

    prompt_ids: list[int]
    """P token ids."""
    completion_ids: list[int]
    """C token ids, the stop token included."""
    rollout_logprobs: Tensor
    """float32 [C]: the sampler's logprobs."""
    reward: float | None = None
    """Weighted sum of the reward terms; None: nobody scored it, and it is left out of its group and of the loss."""
    reward_terms: dict[str, float | None] = field(default_factory=dict)
    """Each reward function's own value, before weights."""
    advantage: float | Tensor = 0.0
    """A number, or float32 [C] where the estimator works by token."""
    policy_versions: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """int64 [C]: see :class:`Completion`."""
    truncated: bool = False
    """True where the token budget ended it."""
    text: str = ""
    """The completion as text, for rewards and for people."""
    loss_mask: Tensor | None = None
    """bool [C], or None for all True: False keeps a token (an observation, say) out of the loss."""
    scored_logprobs: Tensor | None = None
    """float32 [C]: the trainer's logprobs before the first update on this rollout; None until scored."""
    ref_logprobs: Tensor | None = None
    """float32 [C]: the frozen reference's logprobs."""
    group_id: int = 0
    """Equal for completions of one prompt."""
    token_rewards: Tensor | None = None
    """float32 [C]: rewards of single tokens beside ``reward``, for algorithms that work by token."""
    values: Tensor | None = None
    """float32 [C]: a critic's values from before each token on, before the first update on this rollout."""
    returns: Tensor | None = None
    """float32 [C]: what those values are drawn to."""
    turns: int = 1
    """Turns of the model: more than one only in an environment."""

    @property
    def token_ids(self) -> Tensor:
        """int64 [P + C]: prompt and completion end to end."""
        return torch.tensor(self.prompt_ids + self.completion_ids)

    @property
    def old_logprobs(self) -> Tensor:
        """float32 [C]: the trainer's logprobs before the first update, or the sampler's until it was scored."""
        return self.rollout_logprobs if self.scored_logprobs is None else self.scored_logprobs


@dataclass(slots=True)
class RolloutGroup:
    """The completions of one prompt."""

    prompt: Prompt
    rollouts: list[Rollout]

    @property
    def rewards(self) -> list[float | None]:
        """One reward for each rollout, None where nobody scored it."""
        return [r.reward for r in self.rollouts]

    @property
    def mean_reward(self) -> float | None:
        """Mean of the rewards that are there, or None."""
        given = [reward for reward in self.rewards if reward is not None]
        return sum(given) / len(given) if given else None


@dataclass(slots=True)
class RolloutBatch:
    """Groups that were sampled together, on one rank."""

    groups: list[RolloutGroup]
    policy_version: int = 0
    """Optimizer steps done by the weights that sampled the batch (the oldest, where they differ)."""
    temperature: float = 1.0
    """Sampling temperature."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time of each stage that made the batch, by metric name."""
    max_completion_tokens: int = 0
    """Longest completion that was allowed; 0: not known."""

    @property
    def rollouts(self) -> list[Rollout]:
        """All rollouts, group after group."""
        return [r for g in self.groups for r in g.rollouts]

    def compute_advantages(self, scale: bool = False) -> Tensor:
        """Set each rollout's ``advantage`` to its reward less the mean of its group, and return them, float32 [R].

        Args:
            scale: divide by the group's std (see :func:`~lightrl.advantages.group_zscore`).

        Raises:
            ValueError: no reward function was asked about any rollout.
        """
        rollouts = self.rollouts
        if rollouts and all(r.reward is None and not r.reward_terms for r in rollouts):
            raise ValueError(
                f"none of {len(rollouts)} rollouts has a reward: give reward_fn where they are made, or set "
                "rollout.reward on each before"
            )
        group_ids = [i for i, g in enumerate(self.groups) for _ in g.rollouts]
        estimate = group_zscore if scale else group_mean
        advantages = estimate([r.reward for r in rollouts], group_ids)
        for rollout, advantage in zip(rollouts, advantages.tolist(), strict=True):
            rollout.advantage = advantage
        return advantages

    def __iter__(self) -> Iterator[Rollout]:
        return iter(self.rollouts)

    def __len__(self) -> int:
        return sum(len(g.rollouts) for g in self.groups)
