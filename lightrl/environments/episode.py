"""One episode: its tokens end to end, and whose they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightrl.engines.session import Request
from lightrl.environments.base import Done, Environment, Episodes, Turn
from lightrl.rewards.base import check_value
from lightrl.rng import derive_seed
from lightrl.types import Completion, Prompt, Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lightrl.environments.observation import ObservationEncoder
    from lightrl.rewards.pool import Outcome


class Episode:
    """Grows turn by turn; the ids that the engine is given are those that it returned and those of observations.

    Args:
        key: of its requests.
        prompt: what it starts from.
        seed: its turns derive theirs from it.
        how: limits.
        budget: most tokens after the prompt, observations included.
        stop_token_ids: what ends a turn.
    """

    def __init__(
        self, key: int, prompt: Prompt, seed: int, how: Episodes, budget: int, stop_token_ids: tuple[int, ...]
    ) -> None:
        self.key, self.prompt, self.seed, self.how, self.budget = key, prompt, seed, how, budget
        self.stop_token_ids = stop_token_ids
        self.ids: list[int] = []
        self.turns: list[Turn] = []
        self.observations: list[list[int]] = []
        """Token ids of each."""
        self.reward: float | None = None
        self.error: BaseException | None = None
        self.truncated = False
        self._environment: Environment | None = None
        self._logprobs: list[Tensor] = []
        self._versions: list[Tensor] = []
        self._mask: list[Tensor] = []

    @property
    def left(self) -> int:
        """Tokens that the budget still allows."""
        return self.budget - len(self.ids)

    def request(self) -> Request:
        """Return what the engine is asked for: the next turn."""
        size = min(self.left, self.how.max_turn_tokens or self.left)
        return Request(self.key, self.prompt.token_ids + self.ids, size, derive_seed(self.seed, len(self.turns)))

    def add_turn(self, completion: Completion, tokenizer: PreTrainedTokenizerBase) -> Turn:
        """Append a turn of the model."""
        ids = completion.token_ids
        self._append(ids, completion.logprobs, completion.policy_versions, of_the_model=True)
        said = ids[:-1] if ids[-1] in self.stop_token_ids else ids
        turn = Turn(
            index=len(self.turns),
            text=str(tokenizer.decode(ids, skip_special_tokens=True)),
            raw_text=str(tokenizer.decode(said)),
            token_ids=list(ids),
            truncated=completion.truncated,
        )
        self.turns.append(turn)
        return turn

    def add_observation(self, ids: list[int]) -> None:
        """Append an observation: no gradient, no logprob."""
        self.observations.append(ids)
        versions = torch.full((len(ids),), int(self._versions[-1][-1]), dtype=torch.int64)
        self._append(ids, torch.zeros(len(ids)), versions, of_the_model=False)

    def _append(self, ids: list[int], logprobs: Tensor, versions: Tensor, *, of_the_model: bool) -> None:
        self.ids += ids
        self._logprobs.append(logprobs)
        self._versions.append(versions)
        self._mask.append(torch.full((len(ids),), of_the_model))

    @property
    def ended_by(self) -> int | None:
        """The stop token of the last turn, or None where it has none."""
        last = self.turns[-1].token_ids[-1]
        return last if last in self.stop_token_ids else None

    def step(self, turn: Turn) -> Any:
        """Let the environment answer; the first answer makes it. Runs beside the engine."""
        if self._environment is None:
            self._environment = self.how.environment(self.prompt)
        return self._environment.step(turn)

    def hear(self, outcome: Outcome, encoder: ObservationEncoder) -> bool:
        """Take in how a step ended; return whether the episode is over. What goes wrong ends it, in its ``error``."""
        try:
            return self._hear(outcome, encoder)
        except Exception as error:
            self.error = error
            return True

    def _hear(self, outcome: Outcome, encoder: ObservationEncoder) -> bool:
        if outcome.error is not None:
            self.error = outcome.error
            return True
        if isinstance(outcome.value, Done):
            self.reward = check_value(outcome.value.reward)
            return True
        chat = not isinstance(self.prompt.columns.get("prompt", ""), str)
        ids = encoder.encode(outcome.value, chat=chat, ended=self.ended_by)
        if len(self.turns) == self.how.max_turns or len(ids) >= self.left:
            self.truncated, self.reward = True, 0.0  # the budget earns nothing
            return True
        if ids:  # text may encode to nothing
            self.add_observation(ids)
        return False

    def rollout(self, group_id: int, tokenizer: PreTrainedTokenizerBase) -> Rollout:
        """Return it as a rollout without reward."""
        return Rollout(
            prompt_ids=self.prompt.token_ids,
            completion_ids=self.ids,
            rollout_logprobs=torch.cat(self._logprobs),
            policy_versions=torch.cat(self._versions),
            truncated=self.truncated or self.turns[-1].truncated,
            text=str(tokenizer.decode(self.ids, skip_special_tokens=True)),
            loss_mask=torch.cat(self._mask),
            group_id=group_id,
            turns=len(self.turns),
        )
