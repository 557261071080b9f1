"""Many episodes at once on one engine: some wait for tokens while others wait for their environment."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from lightrl.engines.session import Request, Session
from lightrl.environments.episode import Episode
from lightrl.environments.observation import ObservationEncoder
from lightrl.environments.steps import StepRunner

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GLANCE = 0.005  # seconds that an idle rank waits before it steps again with ranks that may be busy


class Player:
    """Plays episodes to their end. Ranks that share the engine play together, each its own.

    Args:
        session: the engine.
        steps: runs environments.
        encoder: of observations.
        tokenizer: of the policy.
    """

    def __init__(
        self, session: Session, steps: StepRunner, encoder: ObservationEncoder, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self.session, self.steps, self.encoder, self.tokenizer = session, steps, encoder, tokenizer
        self._live: dict[int, Episode] = {}
        self._generating = 0

    def play(self, episodes: list[Episode]) -> None:
        """Play all; an error inside an episode ends that one and stays in its ``error``."""
        self._live = {episode.key: episode for episode in episodes}
        ready = [episode.request() for episode in episodes]
        while True:
            busy = self.session.gather(len(self._live))
            if not any(busy):
                return
            ready += self._answered(alone=len(busy) == 1, idle=not ready)
            ready.sort(key=lambda request: request.key)  # whichever step ended first
            self._generating += len(ready)
            for key, completion in self.session.step(ready):
                self._generating -= 1
                episode = self._live[key]
                self.steps.submit(key, partial(episode.step, episode.add_turn(completion, self.tokenizer)))
            ready = []

    def _answered(self, *, alone: bool, idle: bool) -> list[Request]:
        """Return the requests that follow from environments' answers, waiting for some only where nothing else is."""
        found: list[Request] = []
        if self.session.in_rounds:
            while self.steps.pending:
                found += self._requests(None)
        elif idle and not self._generating and alone:
            while self.steps.pending and not found:
                found += self._requests(None)
        else:
            found += self._requests(_GLANCE if idle and not self._generating else 0.0)
        return found

    def _requests(self, wait: float | None) -> list[Request]:
        requests = []
        for key, outcome in self.steps.collect(wait):
            episode = self._live[key]
            if episode.hear(outcome, self.encoder):
                del self._live[key]
            else:
                requests.append(episode.request())
        return requests
