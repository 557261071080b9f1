"""Episodes on an event loop, with an engine that says what it is told: crashes stay apart, and too many are told."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightrl.engines.session import Request
from lightrl.environments import Done, Episodes, Turn
from lightrl.environments.ahead import EpisodesAhead
from lightrl.environments.episode import Episode
from lightrl.environments.source import EpisodeSource
from lightrl.types import Completion, Prompt, Sampling
from tests.helpers.environments import Echo
from tests.helpers.tiny import tiny_tokenizer

PROMPT = Prompt([5, 6], columns={"prompt": "w5 w6"})


async def say(request: Request) -> Completion:
    """Seven, under a policy of the version that the number of tokens so far stands for."""
    version = torch.tensor([len(request.prompt_ids)])
    return Completion([7], torch.tensor([-1.0]), version, truncated=False)


def play(environment: Any, seeds: list[int] | None = None, ask: Any = say, **how: Any) -> list[Episode]:
    ahead = EpisodesAhead(Episodes(environment, **how), tiny_tokenizer(), None, Sampling(24))
    try:
        return asyncio.run(ahead.play(PROMPT, seeds or [1, 2], ask))
    finally:
        ahead.close()


def source(episodes: Episodes, patience: int) -> EpisodeSource:
    strategy: Any = SimpleNamespace()
    return EpisodeSource(strategy, tiny_tokenizer(), None, episodes, patience=patience)


def test_each_token_of_an_episode_has_its_version() -> None:
    for episode in play(Echo):
        rollout = episode.rollout(0, tiny_tokenizer())
        assert rollout.completion_ids == [7, 9, 7, 9, 10, 7]
        assert rollout.policy_versions.tolist() == [2, 2, 4, 4, 4, 7]
        assert rollout.loss_mask is not None
        assert rollout.loss_mask.tolist() == [True, False, True, False, False, True]


def test_seeds_are_the_episodes_own_and_differ_from_turn_to_turn() -> None:
    asked: list[Request] = []

    async def note(request: Request) -> Completion:
        asked.append(request)
        return await say(request)

    play(Echo, [1, 2], note)
    first = {r.key: r.seed for r in asked if len(r.prompt_ids) == 2}
    assert len(asked) == len({r.seed for r in asked}) == 6
    again: list[Request] = asked.copy()
    asked.clear()
    play(Echo, [2, 1], note)
    assert {r.key: r.seed for r in asked if len(r.prompt_ids) == 2} == {0: first[1], 1: first[0]}
    assert {r.seed for r in asked} == {r.seed for r in again}


class Moody(Echo):
    """Crashes in the second turn of every other episode."""

    made: list[Echo] = []

    def step(self, turn: Turn) -> Any:
        if turn.index == 1 and self.made.index(self) % 2:
            raise ZeroDivisionError("boom")
        return super().step(turn)


def test_a_crash_costs_its_episode_only() -> None:
    Moody.made.clear()
    played = play(Moody, [1, 2, 3, 4])
    assert sorted(str(e.error) for e in played) == ["None", "None", "boom", "boom"]
    episodes = Episodes(Moody)
    with pytest.warns(UserWarning, match="2 of 4 episodes crashed and are left out.*turn 2, which said 'w7'.*boom"):
        (group,) = source(episodes, patience=1).graded([PROMPT], [played])
    assert sorted(str(r.reward) for r in group.rollouts) == ["0.0", "0.0", "None", "None"]
    assert (episodes.failures, episodes.failures_in_a_row) == (2, 0)


@pytest.mark.filterwarnings("ignore:.*crashed and are left out")
def test_only_crashes_end_the_run_when_there_are_enough_of_them() -> None:
    class Broken(Echo):
        def step(self, turn: Turn) -> Any:
            raise ZeroDivisionError("boom")

    episodes = Episodes(Broken)
    scores = source(episodes, patience=6)
    for _ in range(2):
        scores.graded([PROMPT], [play(Broken)])
    scores.graded([PROMPT], [play(type("Fine", (Echo,), {"step": lambda self, turn: Done(1.0)}))])
    for _ in range(2):
        scores.graded([PROMPT], [play(Broken)])
    with pytest.raises(RuntimeError, match="all 6 episodes crashed: Prompt row .* turn 1, .*boom") as caught:
        scores.graded([PROMPT], [play(Broken)])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
