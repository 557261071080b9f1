"""Every reward, data source and order through a real fit: what a task is made of works in training, not only alone."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from lightrl import RLModule, RolloutDataModule
from lightrl.environments import Episodes
from lightrl.prompts import gym_rows
from lightrl.rewards import (
    FormatMatch,
    HTTPReward,
    Judge,
    KillableReward,
    LengthPenalty,
    MathMatch,
    RepetitionPenalty,
    RewardModel,
    boxed_match,
    exact_match,
    gym_score,
    hash_match,
    numeric_match,
)
from tests.helpers.environments import Echo, Rollouts, chat_tokenizer, chats
from tests.helpers.server import serving
from tests.helpers.tiny import tiny_prompts
from tests.helpers.training import equal, quiet_trainer, reward_even, tiny_data, tiny_module, weights
from tests.rewards.child_rewards import level
from tests.rewards.test_reward_model import save_classifier


def trained(data: RolloutDataModule, **args: Any) -> Rollouts:
    watch = Rollouts()
    quiet_trainer(callbacks=[watch], **{"max_steps": 2} | args).fit(tiny_module(), data)
    return watch


# -- rewards


@pytest.mark.parametrize(
    "reward",
    [
        exact_match,
        numeric_match,
        boxed_match,
        hash_match,
        FormatMatch(r"w\d+( \S+)*"),
        LengthPenalty(free=1, limit=4),
        RepetitionPenalty(n=1),
        KillableReward(level),
        pytest.param(MathMatch(), marks=pytest.mark.slow),
    ],
    ids=lambda reward: getattr(reward, "__name__", type(reward).__name__),
)
def test_each_built_in_reward_trains(reward: Any) -> None:
    rows = [{"prompt": f"w{6 + i}", "answer": str(i), "level": i} for i in range(6)]
    watch = trained(tiny_data(rows, {"mine": reward, "even": (reward_even, 0.5)}))
    for step in watch.trained:
        for rollout in step:
            assert set(rollout.reward_terms) == {"mine", "even"}
            assert rollout.reward == rollout.reward_terms["mine"] + 0.5 * rollout.reward_terms["even"]
    assert {"reward/mine", "reward/even"} <= set(watch.logged[0])


def test_a_reward_model_trains(tmp_path: Path) -> None:
    watch = trained(tiny_data(chats(), RewardModel(save_classifier(tmp_path)), tokenizer=chat_tokenizer()))
    assert len({r.reward for step in watch.trained for r in step}) > 2


def test_remote_rewards_train() -> None:
    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        if "messages" not in body:
            return 200, {"score": len(body["completion"])}
        return 200, {"choices": [{"message": {"content": "Score: 5"}}]}

    with serving(answer) as server:
        reward = {"length": HTTPReward(server.url), "judge": (Judge("m", server.url), 2.0)}
        watch = trained(tiny_data(chats(), reward, tokenizer=chat_tokenizer()))
    assert all(r.reward == len(r.text) + 1.0 for step in watch.trained for r in step)


# -- data sources


def write_jsonl(folder: Path) -> str:
    path = folder / "gsm8k.jsonl"
    path.write_text("\n".join(json.dumps({"question": f"w{6 + i}", "answer": f"so\n#### {i}"}) for i in range(6)))
    return str(path)


def save_datasets(folder: Path) -> str:
    datasets.DatasetDict({"train": datasets.Dataset.from_list(chats())}).save_to_disk(folder / "saved")
    return f"datasets:{folder}/saved:train"


SOURCES = {
    "gsm8k": write_jsonl,
    "datasets": save_datasets,
    "dataset": lambda folder: datasets.Dataset.from_list(chats()),
    "list": lambda folder: chats(),
    "strings": lambda folder: ["w6 w7", "w8", "w9 w10"],
    "gym": lambda folder: "gym:chain_sum?size=6",
}


@pytest.mark.parametrize("name", SOURCES)
def test_each_data_source_trains(name: str, tmp_path: Path) -> None:
    reward = gym_score if name == "gym" else reward_even
    watch = trained(tiny_data(SOURCES[name](tmp_path), reward, tokenizer=chat_tokenizer(), shuffle=False))
    rollouts = [r for step in watch.trained for r in step]
    assert len(rollouts) == 8
    assert all(r.reward is not None for r in rollouts)
    assert all((r.prompt_ids[0] == 3) is (name != "strings") for r in rollouts), "the template begins with w3"


# -- orders


def mixed(**args: Any) -> RolloutDataModule:
    parts = [([{"prompt": f"w{20 + i}"} for i in range(3)], 3.0), ([{"prompt": f"w{6 + i}"} for i in range(9)], 1)]
    return tiny_data(parts, reward_even, prompts_per_step=4, **args)


def test_a_mixture_has_its_proportions_in_every_step() -> None:
    watch = trained(mixed(), max_steps=3)
    for step in watch.trained:
        assert sum(r.prompt_ids[0] >= 20 for r in step) == 3 * 2, "three prompts of four, two completions each"


def easier_first(prompts: Any, epoch: int, mean_rewards: Any, rng: Any) -> list[int]:
    return sorted(range(len(prompts)), key=lambda i: (-mean_rewards.get(i, 0.0), len(prompts[i].token_ids)))[:4]


def test_a_curriculum_decides_the_order_and_is_told_of_rewards() -> None:
    rows = [{"prompt": "w6 " * (8 - i)} for i in range(8)]
    seen: list[dict[int, float]] = []

    def noting(prompts: Any, epoch: int, mean_rewards: Any, rng: Any) -> list[int]:
        seen.append(dict(mean_rewards))
        return easier_first(prompts, epoch, mean_rewards, rng)

    data = tiny_data(rows, reward_even, prompts_per_step=4, curriculum=noting)
    watch = trained(data, max_steps=2)
    assert [len(r.prompt_ids) for r in watch.trained[0]][::2] == [1, 2, 3, 4]
    first = watch.trained[0]
    means = {
        8 - len(r.prompt_ids): (r.reward + other.reward) / 2 for r, other in zip(first[::2], first[1::2], strict=True)
    }
    assert seen[0] == {}
    assert seen[1] == pytest.approx(means)


@pytest.mark.parametrize("kind", ["mixture", "curriculum"])
def test_an_order_of_ones_own_resumes_where_it_was(kind: str, tmp_path: Path) -> None:
    def data() -> RolloutDataModule:
        if kind == "mixture":
            return mixed()
        return tiny_data(tiny_prompts(8), reward_even, prompts_per_step=3, curriculum="tests.test_tasks:easier_first")

    def run(module: RLModule, steps: int, ckpt: Any = None) -> tuple[Any, Rollouts]:
        watch = Rollouts()
        trainer = quiet_trainer(max_steps=steps, max_epochs=-1, callbacks=[watch])
        trainer.fit(module, data(), ckpt_path=ckpt)
        return trainer, watch

    whole, half, rest = (tiny_module(lr=0.02) for _ in range(3))
    _, unbroken = run(whole, 5)
    run(half, 2)[0].save_checkpoint(tmp_path / "half.ckpt")
    _, resumed = run(rest, 5, tmp_path / "half.ckpt")
    prompts = [[r.prompt_ids for r in step] for step in unbroken.trained]
    assert [[r.prompt_ids for r in step] for step in resumed.trained] == prompts[2:]
    assert equal(weights(whole.policy), weights(rest.policy))


def test_a_curriculum_and_weights_are_refused_together() -> None:
    with pytest.raises(ValueError, match="a curriculum decides the order alone: join the 2 weighted sources"):
        trained(mixed(curriculum=easier_first))


# -- vLLM: at least one of each kind ----------------------------------------------------------------------------------


@pytest.mark.vllm
@pytest.mark.slow
def test_a_source_rewards_and_an_environment_with_vllm() -> None:
    rows = [{**row, "prompt": f"w{6 + i}"} for i, row in enumerate(gym_rows("gcd", size=4))]
    parts = [(rows, 1.0), ([row | {"entry": rows[0]["entry"]} for row in rows], 1.0)]
    reward = {"gym": gym_score, "short": (LengthPenalty(2, 20), 0.5)}
    data = tiny_data(parts, reward, environment=Episodes(Echo, max_turn_tokens=4), max_completion_tokens=30)
    watch = trained(data, strategy="colocated_vllm", max_steps=3)
    for rollout in (r for step in watch.trained for r in step):
        assert rollout.turns == 3
        terms = rollout.reward_terms
        assert set(terms) == {"environment", "gym", "short"}
        assert rollout.reward == pytest.approx(terms["environment"] + terms["gym"] + 0.5 * terms["short"])
    assert max(logged["kl/mismatch"] for logged in watch.logged) < 1e-6
