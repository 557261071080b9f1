"""Rollouts of several turns: the source that plays episodes where the plain one samples completions."""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lightrl.distributed import all_objects, rank
from lightrl.environments.base import Episodes
from lightrl.environments.episode import Episode
from lightrl.environments.observation import ObservationEncoder
from lightrl.environments.play import Player
from lightrl.environments.steps import StepRunner
from lightrl.rewards import RewardSum, Score
from lightrl.rng import derive_seed
from lightrl.sources import RolloutSource, graded
from lightrl.types import Prompt, RolloutGroup, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lightrl.strategies import RolloutStrategy

TERM = "environment"
"""Name of the environment's own reward."""


class EpisodeSource(RolloutSource):
    """Plays ``sampling.num_completions`` episodes of each prompt.

    Reward functions get the last turn's text as completion, and the columns ``turns`` (all of them as text) and
    ``completion_ids`` (the whole episode).

    Args:
        strategy: generates.
        tokenizer: of the policy.
        rewards: score episodes beside the environment's own reward; None: that alone.
        episodes: the environment and its limits.
        template_kwargs: of the chat template, for observations.
        patience: episodes that are played ahead of training, and may crash, before one has to end well.
    """

    def __init__(
        self,
        strategy: RolloutStrategy,
        tokenizer: PreTrainedTokenizerBase,
        rewards: RewardSum | None,
        episodes: Episodes,
        template_kwargs: Mapping[str, Any] | None = None,
        patience: int = 1,
    ) -> None:
        super().__init__(strategy, tokenizer, rewards)
        self.episodes, self.patience = episodes, patience
        self.encoder = ObservationEncoder(tokenizer, template_kwargs)

    def sample(self, prompts: list[Prompt], sampling: Sampling) -> tuple[list[RolloutGroup], list[Score]]:
        """See :meth:`RolloutSource.sample`.

        Raises:
            RuntimeError: every episode on every rank crashed.
        """
        n = sampling.num_completions
        played = [self._episode(i, prompts, sampling) for i in range(len(prompts) * n)]
        steps = StepRunner(self.episodes.step_timeout, self.episodes.max_steps_at_once)
        try:
            with self.strategy.session(sampling) as session:
                Player(session, steps, self.encoder, self.tokenizer).play(played)
        finally:
            steps.close()
        self._generated = time.perf_counter()
        everywhere = all_objects((len(_crashed(played)), len(played)))
        lost, total = (sum(column) for column in zip(*everywhere, strict=True))
        self._report(played, total if lost == total else 0)
        groups = [played[i * n : (i + 1) * n] for i in range(len(prompts))]
        return self._groups(prompts, groups), self._scores(played)

    def graded(self, prompts: list[Prompt], sampled: list[list[Any]]) -> list[RolloutGroup]:
        """Return groups of scored rollouts of episodes that were played, one for each prompt; no collective.

        Raises:
            RuntimeError: none of the last ``patience`` episodes ended well.
        """
        played = [episode for group in sampled for episode in group]
        how, crashed = self.episodes, _crashed(played)
        how.failures_in_a_row = how.failures_in_a_row + len(played) if len(crashed) == len(played) else 0
        self._report(played, how.failures_in_a_row if how.failures_in_a_row >= self.patience else 0)
        return graded(self._groups(prompts, sampled), self._scores(played))

    def _groups(self, prompts: list[Prompt], played: list[list[Episode]]) -> list[RolloutGroup]:
        return [
            RolloutGroup(prompt, [episode.rollout(group_id, self.tokenizer) for episode in group])
            for group_id, (prompt, group) in enumerate(zip(prompts, played, strict=True))
        ]

    def _episode(self, i: int, prompts: list[Prompt], sampling: Sampling) -> Episode:
        which, member = divmod(i, sampling.num_completions)
        parts = (sampling.prompt_seeds[which],) if sampling.prompt_seeds else (sampling.seed, rank(), which)
        return Episode(
            i,
            prompts[which],
            derive_seed(*parts, member),
            self.episodes,
            sampling.max_completion_tokens,
            sampling.stop_token_ids,
        )

    def _scores(self, played: list[Episode]) -> list[Score]:
        good = [episode for episode in played if episode.error is None]
        prompts = [
            replace(e.prompt, columns=e.prompt.columns | {"turns": [turn.text for turn in e.turns]}) for e in good
        ]
        found = [Score() for _ in good]
        if self.rewards is not None:
            found = self.rewards.score([e.turns[-1].text for e in good], prompts, [e.ids for e in good])
        for episode, score in zip(good, found, strict=True):
            score.terms = {TERM: episode.reward} | score.terms
            given = [value for value in (episode.reward, score.total) if value is not None]
            score.total = sum(given) if given else None
        rest = iter(found)
        # All ranks must have the same terms, also one whose episodes all crashed.
        return [next(rest) if e.error is None else Score(terms=dict.fromkeys(self._names)) for e in played]

    def _report(self, played: list[Episode], all_crashed: int) -> None:
        """Count and tell of episodes that crashed; ``all_crashed`` of them, where none ended well, are too many."""
        crashed, first = _crashed(played), self.episodes.failures == 0
        self.episodes.failures += len(crashed)
        facts = _facts(crashed[0]) if crashed else "the error is on another rank"
        if all_crashed:
            cause = crashed[0].error if crashed else None
            raise RuntimeError(f"all {all_crashed} episodes crashed: {facts}") from cause
        if crashed and first:
            warnings.warn(
                f"{len(crashed)} of {len(played)} episodes crashed and are left out; further ones are only counted. "
                f"{facts}",
                stacklevel=4,
            )

    @property
    def _failures(self) -> int:
        return super()._failures + self.episodes.failures

    @property
    def _names(self) -> list[str]:
        return [TERM, *super()._names]


def _crashed(played: list[Episode]) -> list[Episode]:
    return [episode for episode in played if episode.error is not None]


def _facts(episode: Episode) -> str:
    error = episode.error
    assert error is not None
    where = traceback.extract_tb(error.__traceback__)[-1:]
    at = f" ({where[0].filename}, line {where[0].lineno})" if where else ""
    text = episode.turns[-1].text[:200]
    what = f"{type(error).__name__}: {error}{at}"
    return f"Prompt row {episode.prompt.index}, turn {len(episode.turns)}, which said {text!r}: {what}"
