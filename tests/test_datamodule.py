"""Bad input is refused before the policy is loaded; what every source, tokenizer and stop becomes in a real fit."""

import json
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from lightrl import RLModule
from tests.helpers.tiny import by_hand, row, save_tiny, tiny_model, tiny_prompts, tiny_tokenizer
from tests.helpers.training import Steps, equal, fit, quiet_trainer, tiny_data, tiny_module, weights


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def refused(folder: Path, monkeypatch: pytest.MonkeyPatch, *messages: str, trainer: Any = None, **args: Any) -> None:
    """Assert that fit raises one ValueError with all ``messages`` and that no policy was loaded for it."""

    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("the policy was loaded before the input was checked")

    monkeypatch.setattr("lightrl.models.load_policy", load)
    with pytest.raises(ValueError, match=r".") as error:
        quiet_trainer(**{"max_steps": 1} | (trainer or {})).fit(
            RLModule(folder), tiny_data(**{"tokenizer": None} | args)
        )
    for message in messages:
        assert message in str(error.value)


CHAT = [[{"role": "user", "content": "w5"}]] * 4
PROMPTS_OF_1_TO_12 = [{"prompt": " ".join(["w5"] * n)} for n in (1, 2, 3, 12)]
BAD: dict[str, tuple[dict[str, Any], list[str]]] = {
    "missing file": ({"prompts": "nowhere/train.parquet"}, ["nowhere/train.parquet", "does not exist"]),
    "missing column": ({"prompts": [{"query": "w5", "answer": "1"}]}, ["'prompt'", "['answer', 'query']"]),
    "empty list": ({"prompts": []}, ["empty"]),
    "empty dataset": ({"prompts": datasets.Dataset.from_dict({"prompt": []})}, ["empty"]),
    "fewer prompts than a step (B31)": (
        {"prompts": tiny_prompts(3), "prompts_per_step": 4},
        ["prompts_per_step=4", "3 training prompts"],
    ),
    "long prompts (B20)": (
        {"prompts": PROMPTS_OF_1_TO_12, "max_prompt_tokens": 8},
        ["1 of 4 prompts", "max_prompt_tokens=8", "12 tokens", "row 3", "on_long_prompt='drop'"],
    ),
    "only long prompts (B20)": (
        {"prompts": PROMPTS_OF_1_TO_12, "max_prompt_tokens": 8, "on_long_prompt": "drop", "val_prompts": ["w5 " * 9]},
        ["1 of 1 prompts", "none is left"],
    ),
    "prompts longer than the model's context": (
        {"prompts": ["w5 " * 126, "w5"]},
        ["1 of 2 prompts", "126 tokens"],
    ),
    "completions longer than the model's context": (
        {"max_completion_tokens": 128},
        ["max_completion_tokens=128", "128 tokens"],
    ),
    "group of one (B05)": ({"group_size": 1}, ["group_size=1", "RLModule", "at least 2"]),
    "chat without a template": ({"prompts": [{"prompt": p} for p in CHAT]}, ["chat template"]),
    "a micro-batch too small for one sequence": (
        {"max_tokens_per_micro_batch": 5},
        ["max_tokens_per_micro_batch=5", "3 + 3 tokens", "max_completion_tokens"],
    ),
    "accumulate_grad_batches": (
        {"trainer": {"accumulate_grad_batches": 2}},
        ["accumulate_grad_batches=2", "prompts_per_step", "max_tokens_per_micro_batch"],
    ),
    "a strategy that cannot generate": ({"trainer": {"strategy": "auto"}}, ["cannot generate", "colocated_hf"]),
    "broken validation data": ({"val_prompts": [{"text": "w5"}]}, ["'prompt'", "['text']"]),
}


@pytest.mark.parametrize("fault", BAD)
def test_bad_input_is_refused_before_the_policy_is_loaded(
    fault: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, messages = BAD[fault]
    refused(folder, monkeypatch, *messages, **arguments)


def test_no_training_prompts(folder: Path) -> None:
    from lightrl import RolloutDataModule

    data = RolloutDataModule(None, len, val_prompts=["w5"])
    with pytest.raises(ValueError, match="train_prompts is None"):
        quiet_trainer(max_steps=1).fit(RLModule(folder), data)
    with pytest.raises(ValueError, match="val_prompts is None: validate needs"):
        quiet_trainer().validate(RLModule(folder), tiny_data())


def test_prompts_that_do_not_divide_over_ranks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightrl.datamodule.world_size", lambda: 3)
    refused(folder, monkeypatch, "prompts_per_step=4", "3 ranks", prompts_per_step=4)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": 0}, "temperature=0 cannot be trained on"),
        ({"temperature": -1.0}, "temperature=-1.0 cannot"),
        ({"val_temperature": -1.0}, "val_temperature=-1.0"),
        ({"group_size": 0}, "group_size=0"),
        ({"prompts_per_step": 0}, "prompts_per_step=0"),
        ({"max_completion_tokens": 4.5}, "max_completion_tokens=4.5 must be a whole number"),
        ({"max_completion_tokens": 0}, "max_completion_tokens=0"),
        ({"val_batch_size": 0}, "val_batch_size=0"),
        ({"epochs_per_rollout": 0}, "epochs_per_rollout=0"),
        ({"minibatches_per_rollout": 5}, "minibatches_per_rollout=5 is more than the 4 rollouts"),
        ({"on_long_prompt": "cut"}, "on_long_prompt='cut'"),
        ({"on_reward_error": "ignore"}, "on_error='ignore'"),
        ({"reward": []}, "no reward"),
        ({"reward": "nowhere.reward"}, "nowhere"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused_at_once(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_data(**wrong)


def test_b20_long_prompts_are_dropped_with_a_count() -> None:
    data = tiny_data(PROMPTS_OF_1_TO_12, max_prompt_tokens=8, on_long_prompt="drop", prompts_per_step=3)
    with pytest.warns(UserWarning, match="1 of 4 prompts .* left out"):
        watch = fit(data, max_epochs=2)
    assert [sorted(map(len, prompts)) for prompts in watch.trained] == [[1, 2, 3]] * 2


def returns_none(completion: str) -> None:
    return None


def returns_nan(completion: str) -> float:
    return float("nan")


def returns_text(completion: str) -> str:
    return "good"


def returns_one(completions: list[str]) -> list[float]:
    return [1.0]


@pytest.mark.parametrize(
    ("reward", "received"),
    [
        (returns_none, "none of 4 completions"),
        (returns_nan, "nan"),
        (returns_text, "'good'"),
        (returns_one, "1 values"),
    ],
)
def test_b21_a_reward_of_the_wrong_kind_ends_the_run(reward: Any, received: str) -> None:
    module = tiny_module()
    with pytest.raises(ValueError, match=received) as error:
        quiet_trainer(max_steps=1).fit(module, tiny_data(reward=reward))
    assert f"'{reward.__name__}'" in str(error.value)
    assert equal(weights(module.policy), weights(tiny_model())), "nothing was trained on it"


def plain(completion: str, ground_truth: Any) -> float:
    return 0.0


def judged_alone(completion: str) -> float:
    return 0.0


def of_a_column(completion: str, level: int) -> float:
    return 0.0


def many(completions: list[str], ground_truth: list[Any]) -> list[float]:
    return [0.0] * len(completions)


@pytest.mark.parametrize(
    ("reward", "column", "warned"),
    [
        (plain, "solution", True),
        (many, "solution", True),
        (plain, "answer", False),
        (judged_alone, "solution", False),
        (of_a_column, "solution", False),
    ],
)
def test_prompts_without_the_ground_truth_that_a_reward_takes(reward: Any, column: str, warned: bool) -> None:
    data = tiny_data([{"prompt": "w5", column: "1", "level": 3}] * 2, reward)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet_trainer(max_steps=1).fit(tiny_module(), data)
    said = [str(w.message) for w in caught if "ground truth" in str(w.message)]
    assert len(said) == warned
    assert all(f"'{reward.__name__}' gets None" in text and "'solution'" in text for text in said)


def test_a_reward_that_fails_everywhere_costs_a_step_only_if_asked_for() -> None:
    module = tiny_module()
    with pytest.warns(UserWarning, match="returns_nan"):
        watch = fit(tiny_data(reward=returns_nan, on_reward_error="exclude"), module, max_steps=2)
    assert [s.measured["reward/excluded_frac"] for s in watch.steps] == [(4.0, 4.0)] * 2
    assert equal(weights(module.policy), weights(tiny_model()))


def test_every_kind_of_source_gives_the_same_run(tmp_path: Path) -> None:
    rows = [{"prompt": row(i), "reward_model": {"ground_truth": str(i)}} for i in range(4)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    seen: list[Any] = []

    def reward(completion: str, ground_truth: str) -> float:
        seen.append(ground_truth)
        return 0.0

    found = []
    for source in (rows, tmp_path / "a.parquet", str(tmp_path / "a.jsonl"), datasets.Dataset.from_list(rows)):
        watch = fit(tiny_data(source, reward, prompts_per_step=4, group_size=3), max_steps=1)
        found.append((watch.sampled, Counter(seen)))
        seen.clear()
    assert found == [found[0]] * 4
    assert found[0][1] == {str(i): 3 for i in range(4)}


def test_b16_pad_equal_to_eos_changes_nothing() -> None:
    """Prompts, samples, masks and weights are those of a run whose tokenizer has a pad token of its own."""
    runs = []
    for pad in ("<pad>", "<eos>"):
        tokenizer, module = tiny_tokenizer(), tiny_module(lr=1e-2)
        tokenizer.pad_token = pad
        prompts = ["w5 <eos> w6", "<eos> w7", "w4", "w8 w9"]
        data = tiny_data(prompts, tokenizer=tokenizer, group_size=8, max_completion_tokens=8)
        watch = fit(data, module, max_steps=2)
        runs.append((watch.sampled, weights(module.policy), watch.steps))
    assert runs[0][0] == runs[1][0]
    assert equal(runs[0][1], runs[1][1])
    steps = runs[1][2]
    ended = [r for s in steps for r in s.rollouts if not r.truncated]
    assert ended
    assert all(r.completion_ids.index(2) == len(r.completion_ids) - 1 for r in ended)
    assert all(m.loss_mask.all() and int((m.targets == 2).sum()) for s in steps for m in s.micro)
    assert any(2 in r.prompt_ids for s in steps for r in s.rollouts)


def test_b17_any_stop_id_ends_a_completion_also_id_0() -> None:
    model = tiny_model()
    model.generation_config.eos_token_id = [7, 0, 11]
    watch = Steps()
    data = tiny_data(group_size=16, max_completion_tokens=6)
    quiet_trainer(max_steps=1, callbacks=[watch]).fit(RLModule(model, lr=1e-3), data)
    rollouts = watch.steps[0].rollouts
    stops = {0, 2, 7, 11}  # 2 is the tokenizer's
    for r in rollouts:
        assert not stops & set(r.completion_ids[:-1])
        assert r.truncated == (r.completion_ids[-1] not in stops)
        assert len(r.completion_ids) == 6 or not r.truncated
    assert {r.completion_ids[-1] for r in rollouts if not r.truncated} >= {0, 7, 11}
    share = sum(r.truncated for r in rollouts) / len(rollouts)
    assert 0 < share < 1
    assert watch.logged[0]["rollout/truncated_frac"] == pytest.approx(share)


def test_no_stop_id_at_all_is_an_error() -> None:
    model, tokenizer = tiny_model(), tiny_tokenizer()
    model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token = None
    with pytest.raises(ValueError, match="nothing stops a completion"):
        quiet_trainer(max_steps=1).fit(RLModule(model), tiny_data(tokenizer=tokenizer))


def test_what_was_sampled_is_what_is_trained_on() -> None:
    watch = fit(tiny_data(temperature=0.7, group_size=4), tiny_module(lr=0.0), max_steps=1)
    (step,) = watch.steps
    trained = [torch.cat([m.input_ids[s] for s in spans]).tolist() for m in step.micro for spans in m.sequences()]
    assert sorted(trained) == sorted(r.token_ids.tolist() for r in step.rollouts)
    for r in step.rollouts:
        right = by_hand(tiny_model(), r.prompt_ids, r.completion_ids, 0.7)
        assert (r.rollout_logprobs - right).abs().max() < 1e-5
        assert r.text == tiny_tokenizer().decode(r.completion_ids, skip_special_tokens=True)
    assert watch.logged[0]["kl/mismatch"] < 1e-9


def test_another_models_tokenizer_makes_new_prompts() -> None:
    data = tiny_data(["w5 w6", "w7"], tokenizer=None)
    for shift in (0, 1):
        module = tiny_module()
        module.tokenizer = tiny_tokenizer()
        if shift:
            vocabulary = {t: (i + 1) % 32 if i > 2 else i for t, i in module.tokenizer.get_vocab().items()}
            vocabulary["w31"] = 3
            module.tokenizer._tokenizer.model = type(module.tokenizer._tokenizer.model)(vocabulary, unk_token="<unk>")
        watch = fit(data, module, max_steps=1)
        assert sorted(watch.trained[0]) == [(5 + shift, 6 + shift), (7 + shift,)]
