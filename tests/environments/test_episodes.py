"""Episodes through real fits: tokens, masks and logprobs against an oracle, budgets, and failures that stay apart."""

import asyncio
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from lightrl import RLModule
from lightrl.environments import Done, Episodes, Turn
from lightrl.packing import pack
from lightrl.policy import PolicyForward
from lightrl.types import Prompt, Rollout
from tests.helpers.environments import Echo, Rollouts, play, turns_of
from tests.helpers.tiny import by_hand, tiny_tokenizer
from tests.helpers.training import equal, quiet_trainer, tiny_data, tiny_module, weights

BAR = 1e-4


def check_against_oracle(rollout: Rollout, policy: Any, tokenizer: Any, seen: list[Turn]) -> None:
    """Each turn is scored separately, by one plain forward for each token, given all that came before it."""
    pieces = turns_of(rollout)
    assert [of_model for _, _, of_model in pieces] == [True, False, True, False, True]
    said = [rollout.completion_ids[a:b] for a, b, of_model in pieces if of_model]
    assert said == [turn.token_ids for turn in seen]
    heard = [rollout.completion_ids[a:b] for a, b, of_model in pieces if not of_model]
    assert heard == [tokenizer.convert_tokens_to_ids(words) for words in (["w9"], ["w9", "w10"])]
    for start, end, of_model in pieces:
        found = rollout.rollout_logprobs[start:end]
        if not of_model:
            assert found.tolist() == [0.0] * (end - start)
            continue
        before = rollout.prompt_ids + rollout.completion_ids[:start]
        wanted = by_hand(policy, before, rollout.completion_ids[start:end])
        assert float((found - wanted).abs().max()) < BAR
    micro = pack([rollout], temperature=1.0)
    assert torch.equal(micro.loss_mask, rollout.loss_mask)
    with torch.no_grad():
        trainers, _ = PolicyForward()(policy, micro)
    assert float((trainers - rollout.rollout_logprobs)[micro.loss_mask].abs().max()) < BAR


@pytest.mark.parametrize("engine", ["colocated_hf", pytest.param("colocated_vllm", marks=pytest.mark.vllm)])
def test_every_token_of_an_episode_is_the_oracles(engine: str) -> None:
    Echo.made.clear()
    how = Episodes(Echo, max_turn_tokens=4)
    watch = play(how, tiny_module(lr=0.02), strategy=engine, max_steps=2, group_size=3)
    tokenizer = tiny_tokenizer()
    seen = {tuple(t for turn in e.seen for t in turn.token_ids): e.seen for e in Echo.made}
    for rollouts, policy in zip(watch.trained, watch.policies, strict=True):
        assert len(rollouts) == 6
        for rollout in rollouts:
            mine = [t for t, live in zip(rollout.completion_ids, rollout.loss_mask.tolist(), strict=True) if live]
            check_against_oracle(rollout, policy, tokenizer, seen[tuple(mine)])
            assert rollout.turns == 3
            assert rollout.reward == sum(turn.token_ids[0] % 2 == 0 for turn in seen[tuple(mine)])
    assert watch.logged[0]["rollout/turns_mean"] == 3


# -- budgets ----------------------------------------------------------------------------------------------------------


class Endless(Echo):
    def step(self, turn: Turn) -> Any:
        return "w9 w10"


def test_an_environment_that_never_ends_meets_its_budget_of_turns() -> None:
    watch = play(Episodes(Endless, max_turns=4, max_turn_tokens=2), max_completion_tokens=100)
    for rollout in watch.trained[0]:
        assert rollout.turns == 4
        assert rollout.truncated
        assert rollout.reward == 0.0
        assert rollout.loss_mask[-1], "no observation that nobody reads"


def test_the_budget_of_tokens_holds_for_the_whole_episode() -> None:
    watch = play(Episodes(Endless, max_turns=50, max_turn_tokens=3), max_completion_tokens=11)
    for rollout in watch.trained[0]:
        assert len(rollout.completion_ids) <= 11
        assert rollout.loss_mask[-1]
        assert rollout.truncated
        assert rollout.reward == 0.0
    assert any(r.turns > 1 for r in watch.trained[0])


# -- failures that cost one episode -----------------------------------------------------------------------------------


class Fails(Echo):
    """Fails, in a way that depends on ``how``, for one of the prompts; ends the others with reward 1."""

    how = "raise"

    def step(self, turn: Turn) -> Any:
        if self.prompt.index != 0:
            return Done(reward=1.0)
        if self.how == "raise":
            raise ZeroDivisionError("boom")
        if self.how == "exit":
            raise SystemExit(3)
        if self.how == "nan":
            return Done(reward=float("nan"))
        if self.how == "sleep":
            threading.Event().wait(600)
        while True:
            pass


class FailsAsync(Fails):
    async def step(self, turn: Turn) -> Any:  # type: ignore[override]
        if self.prompt.index == 0 and self.how == "sleep":
            await asyncio.sleep(600)
        await asyncio.sleep(0.01)
        return super().step(turn)


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        *((Fails, how) for how in ("raise", "exit", "nan", "sleep", "spin")),
        *((FailsAsync, how) for how in ("raise", "exit", "sleep")),
    ],
)
def test_a_crash_costs_its_episode_only(kind: type[Fails], how: str) -> None:
    environment = type("Fails", (kind,), {"how": how})
    episodes = Episodes(environment, step_timeout=0.5)
    started = time.perf_counter()
    with pytest.warns(UserWarning, match="2 of 4 episodes crashed and are left out.*Prompt row 0, turn 1"):
        watch = play(episodes, prompts_per_step=2, shuffle=False)
    assert time.perf_counter() - started < 20
    assert [r.reward for r in watch.trained[0]] == [1.0, 1.0], "the crashed ones are not trained on"
    assert watch.logged[0]["reward/excluded_frac"] == 0.5
    assert watch.logged[0]["reward/mean"] == 1.0
    assert episodes.failures == 2


def test_the_making_of_an_environment_may_crash_too() -> None:
    class Picky(Echo):
        def __init__(self, prompt: Prompt) -> None:
            if prompt.index == 0:
                raise KeyError("no such world")
            super().__init__(prompt)

    with pytest.warns(UserWarning, match="KeyError: 'no such world'"):
        assert len(play(Picky, shuffle=False).trained[0]) == 2


def test_all_crashed_is_an_error_with_its_cause() -> None:
    class Broken(Echo):
        def step(self, turn: Turn) -> Any:
            raise ZeroDivisionError("boom")

    with pytest.raises(RuntimeError, match="all 4 episodes crashed: Prompt row .* turn 1, which said .*boom") as caught:
        play(Broken)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_an_environment_that_rewards_nothing_is_named() -> None:
    with pytest.raises(ValueError, match="none of 4 completions has a reward: 'environment' returned None"):
        play(type("Silent", (Echo,), {"step": lambda self, turn: Done()}))


# -- rewards, reproducibility, validation -----------------------------------------------------------------------------


def test_reward_functions_see_the_last_turn_and_all_turns() -> None:
    calls: list[tuple[str, list[str], int]] = []

    def judge(completion: str, ground_truth: Any, turns: list[str], completion_ids: list[int]) -> float:
        calls.append((completion, turns, len(completion_ids)))
        return 10.0

    watch = play(Episodes(Echo, max_turn_tokens=3), reward=judge, group_size=2)
    for rollout in watch.trained[0]:
        assert rollout.reward == 10.0 + rollout.reward_terms["environment"]
        assert rollout.reward_terms["judge"] == 10.0
    assert all(len(turns) == 3 and completion == turns[-1] for completion, turns, _ in calls)
    assert sorted(n for *_, n in calls) == sorted(len(r.completion_ids) for r in watch.trained[0])
    assert watch.logged[0]["reward/judge"] == 10.0


class Slow(Echo):
    """Ends later, the later it was made: the order in which steps end is another one in every run."""

    def step(self, turn: Turn) -> Any:
        time.sleep(0.02 * torch.rand(()).item())
        return super().step(turn)


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_same_seeds_give_the_same_episodes(deterministic: bool) -> None:
    runs = []
    for _ in range(2):
        module = tiny_module(lr=0.02)
        watch = play(Episodes(Slow, max_turn_tokens=3), module, max_steps=2, deterministic=deterministic)
        runs.append(([[(r.completion_ids, r.reward) for r in step] for step in watch.trained], weights(module.policy)))
    assert runs[0][0] == runs[1][0]
    assert equal(runs[0][1], runs[1][1])
    ids = [tuple(r) for step in runs[0][0] for r, _ in step]
    assert len(set(ids)) == len(ids), "every episode has seeds of its own"


def test_validation_plays_episodes_too() -> None:
    watch = Rollouts()
    data = tiny_data(None, None, environment=Episodes(Echo, max_turn_tokens=2), val_prompts=["w3", "w4 w5", "w6"])
    data.max_completion_tokens = 20
    (found,) = quiet_trainer(callbacks=[watch]).validate(tiny_module(), data, verbose=False)
    assert [r.turns for r in watch.validated] == [3, 3, 3]
    assert found["val/reward"] == pytest.approx(sum(r.reward or 0.0 for r in watch.validated) / 3)


def test_a_run_that_is_resumed_amid_reused_episodes_ends_the_same(tmp_path: Path) -> None:
    def run(module: RLModule, **args: Any) -> Any:
        how = {"environment": Episodes(Echo, max_turn_tokens=3), "max_completion_tokens": 24}
        data = tiny_data(None, None, minibatches_per_rollout=2, **how)
        trainer = quiet_trainer(**args)
        trainer.fit(module, data, ckpt_path=ckpt if ckpt.exists() and args["max_steps"] == 4 else None)
        return trainer

    ckpt = tmp_path / "half.ckpt"
    whole, half, rest = tiny_module(lr=0.02), tiny_module(lr=0.02), tiny_module(lr=0.02)
    run(whole, max_steps=4)
    run(half, max_steps=1).save_checkpoint(ckpt)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(rest, max_steps=4)
    assert equal(weights(whole.policy), weights(rest.policy))


# -- bad arguments ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"environment": 5}, "environment=5 cannot be called"),
        ({"environment": "tests.nowhere:Env"}, "environment 'tests.nowhere:Env': there is no module"),
        ({"environment": Echo, "max_turns": 0}, "max_turns=0 must be at least 1"),
        ({"environment": Echo, "max_turn_tokens": 0}, "max_turn_tokens=0 must be at least 1"),
        ({"environment": Echo, "step_timeout": 0.0}, "step_timeout=0.0 must be more than 0"),
    ],
)
def test_bad_limits_are_named(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Episodes(**args)


def test_a_datamodule_wants_a_reward_or_an_environment() -> None:
    with pytest.raises(ValueError, match="reward=None: give a reward function, or an environment that rewards"):
        tiny_data(None, None)


def test_an_environment_may_be_an_import_path() -> None:
    assert Episodes("tests.helpers.environments:Echo").environment is Echo
