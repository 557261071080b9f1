"""Episodes of several turns sampled ahead of training: a model that calls a calculator, and engines that are lost."""

import copy
import os
import signal
from collections import Counter
from functools import cache
from typing import Any

import pytest

from examples.calculator import run as calculator
from lightrl import RLModule, RolloutDataModule
from lightrl.corrections import TruncatedToken
from lightrl.environments import Episodes, ToolUse
from lightrl.rewards import exact_match
from lightrl.strategies import AsyncVLLMStrategy, ColocatedVLLMStrategy
from tests.helpers.ahead import Record, processes_of
from tests.helpers.fits import BAR, quiet_trainer

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@cache
def taught() -> tuple[Any, Any]:
    """The example's model, which knows the form of a call, and its tokenizer."""
    tokenizer = calculator.make_tokenizer(calculator.WORDS, calculator.CHAT_TEMPLATE)
    model = calculator.make_model(0, calculator.WORDS)
    calculator.imitate(model, tokenizer, 120)
    return model, tokenizer


def play(strategy: Any, tool: Any = calculator.multiply, *, max_steps: int, rows: int = 32, **args: Any) -> Record:
    model, tokenizer = taught()
    data = RolloutDataModule(
        calculator.split(0)[0][:rows],
        reward=exact_match,
        environment=Episodes(ToolUse([tool]), max_turns=3, max_turn_tokens=16),
        tokenizer=tokenizer,
        **{"group_size": 3, "prompts_per_step": 4, "max_completion_tokens": 40, "seed": 0} | args,
    )
    record = Record()
    trainer = quiet_trainer(strategy, callbacks=[record], max_steps=max_steps)
    trainer.fit(RLModule(copy.deepcopy(model), lr=1e-3, correction=TruncatedToken()), data)
    return record


def test_staleness_0_with_seeds_plays_the_colocated_episodes() -> None:
    strategies = (ColocatedVLLMStrategy(), AsyncVLLMStrategy(max_staleness=0))
    colocated, ahead = (play(s, max_steps=3, deterministic=True) for s in strategies)
    for theirs, ours in zip(colocated.rollouts, ahead.rollouts, strict=True):
        assert [r.token_ids.tolist() for r in ours] == [r.token_ids.tolist() for r in theirs]
        assert [r.reward for r in ours] == [r.reward for r in theirs]
    assert ahead.losses == pytest.approx(colocated.losses, abs=1e-5)
    assert max(r.turns for rs in ahead.rollouts for r in rs) > 1
    assert set(ahead.ages) == {0}


def test_an_engine_killed_in_mid_episode_costs_a_turn_and_no_episode() -> None:
    """A call of the tool kills the engine: the next turn of its episode is the new engine's."""
    strategy, called, pools = AsyncVLLMStrategy(max_staleness=2), [], []

    def multiply(a: int, b: int) -> int:
        """Multiply two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        called.append((a, b))
        if len(called) == 25:
            pools.append(strategy._pool)
            os.kill(processes_of(strategy)[0].pid, signal.SIGKILL)
        return a * b

    record = play(strategy, multiply, max_steps=8)
    assert pools[0]._engines[0].losses == 1
    assert record.prompts == Counter(dict.fromkeys(record.prompts, 1))
    assert len(record.prompts) == 32
    assert max(record.ages) == 2
    assert max(record.gaps()) < BAR
    several = [r for rs in record.rollouts for r in rs if len(r.policy_versions.unique()) > 1]
    assert several, "no push met an episode"
    assert max(r.turns for rs in record.rollouts for r in rs) > 1
    assert all(r.loss_mask.any() and not r.loss_mask.all() for rs in record.rollouts for r in rs if r.turns > 1)
