"""Episodes on an event loop: each goes on as soon as its engine or its environment has answered."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

from lightrl.engines.session import Request
from lightrl.environments.episode import Episode
from lightrl.environments.observation import ObservationEncoder
from lightrl.environments.steps import StepRunner
from lightrl.types import Completion, Prompt, Sampling

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from transformers import PreTrainedTokenizerBase

    from lightrl.environments.base import Episodes

Ask = Callable[[Request], Awaitable[Completion]]
"""Samples a turn."""


class EpisodesAhead:
    """Plays the episodes of one prompt after the other, of many prompts at the same time.

    Args:
        how: the environment and its limits.
        tokenizer: of the policy.
        template_kwargs: of the chat template, for observations.
        sampling: the budget of an episode, and what ends a turn.
    """

    def __init__(
        self,
        how: Episodes,
        tokenizer: PreTrainedTokenizerBase,
        template_kwargs: Mapping[str, Any] | None,
        sampling: Sampling,
    ) -> None:
        self.how, self.sampling = how, sampling
        self.tokenizer = copy.deepcopy(tokenizer)  # two threads must not set one to different padding or truncation
        self.encoder = ObservationEncoder(self.tokenizer, template_kwargs)
        self._steps = StepRunner(how.step_timeout, how.max_steps_at_once)

    async def play(self, prompt: Prompt, seeds: list[int], ask: Ask) -> list[Episode]:
        """Play an episode for each seed; an error inside one ends that one and stays in its ``error``."""
        budget, stops = self.sampling.max_completion_tokens, self.sampling.stop_token_ids
        episodes = [Episode(i, prompt, seed, self.how, budget, stops) for i, seed in enumerate(seeds)]
        await asyncio.gather(*(self._play(episode, ask) for episode in episodes))
        return episodes

    async def _play(self, episode: Episode, ask: Ask) -> None:
        over = False
        while not over:
            turn = episode.add_turn(await ask(episode.request()), self.tokenizer)
            over = episode.hear(await self._steps.run(partial(episode.step, turn)), self.encoder)

    def close(self) -> None:
        """Abandon the steps that still run."""
        self._steps.close()
