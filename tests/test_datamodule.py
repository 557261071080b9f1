"""From prompts to optimizer steps through a real Trainer: bad input, order, reuse, validation, one and two ranks."""

import json
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from lightning.pytorch import Callback

from lightrl import RLModule, Rollout, RolloutBatch
from lightrl.distributed import rank
from lightrl.packing import StepBatch
from tests.helpers.tiny import by_hand, save_tiny, tiny_model, tiny_prompts, tiny_tokenizer
from tests.helpers.training import equal, quiet_trainer, tiny_data, tiny_module, weights


class Watch(Callback):
    """What was trained on, step by step, and what was validated."""

    def __init__(self) -> None:
        self.steps: list[StepBatch] = []
        self.validated: list[RolloutBatch] = []
        self.logged: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: StepBatch, batch_idx: int) -> None:
        self.steps.append(batch)
        self.logged.append({name: float(v) for name, v in trainer.callback_metrics.items()})

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        self.validated.append(batch)

    @property
    def trained(self) -> list[list[tuple[int, ...]]]:
        """Each step's prompts, once for each group."""
        return [list(dict.fromkeys(tuple(r.prompt_ids) for r in s.rollouts)) for s in self.steps]

    @property
    def sampled(self) -> list[list[tuple[int, ...]]]:
        return [[(*r.prompt_ids, -1, *r.completion_ids) for r in s.rollouts] for s in self.steps]


def fit(data: Any, module: Any = None, **args: Any) -> Watch:
    watch = Watch()
    quiet_trainer(callbacks=[watch], **args).fit(module or tiny_module(), data)
    return watch


def row(i: int) -> str:
    return f"w{3 + i // 9} w{3 + i % 9}"


# -- bad input ------------------------------------------------------------------------------------------------------


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


# -- sources, tokens and stops ----------------------------------------------------------------------------------------


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
    watch = Watch()
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


# -- order and reuse --------------------------------------------------------------------------------------------------


def test_prompts_left_over_are_carried_into_the_next_epoch() -> None:
    watch = fit(tiny_data([row(i) for i in range(10)], prompts_per_step=4), max_steps=5)
    assert [len(prompts) for prompts in watch.trained] == [4] * 5
    assert set(Counter(p for prompts in watch.trained for p in prompts).values()) == {2}
    assert len({p for prompts in watch.trained[:2] for p in prompts}) == 8


@pytest.mark.parametrize(("reuse", "steps"), [((1, 1), 2), ((2, 3), 12)])
def test_the_length_of_an_epoch(reuse: tuple[int, int], steps: int) -> None:
    data = tiny_data(
        [row(i) for i in range(5)],
        max_completion_tokens=1,
        epochs_per_rollout=reuse[0],
        minibatches_per_rollout=reuse[1],
    )
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(tiny_module(), data)
    assert len(data.train_dataloader()) == trainer.num_training_batches == trainer.global_step == steps


def test_reused_rollouts_are_each_in_one_mini_batch_a_pass() -> None:
    module = tiny_module(lr=1e-2)
    data = tiny_data(group_size=4, epochs_per_rollout=2, minibatches_per_rollout=3)
    watch = fit(data, module, max_steps=12)
    for first in (0, 6):
        passes = [watch.steps[first + 3 * i : first + 3 * i + 3] for i in range(2)]
        orders = []
        for mini in passes:
            assert [len(s.rollouts) for s in mini] == [3, 3, 2]
            orders.append([tuple(map(int, r.token_ids)) for s in mini for r in s.rollouts])
        assert len(orders[0]) == 8
        assert Counter(orders[0]) == Counter(orders[1])
        assert orders[0] != orders[1], "not reshuffled"
        assert {s.policy_version for s in watch.steps[first : first + 6]} == {first}
    for step in watch.steps[:6]:  # of the very first policy, also when five updates have passed
        for r in step.rollouts:
            assert r.scored_logprobs is not None
            assert (r.scored_logprobs - by_hand(tiny_model(), r.prompt_ids, r.completion_ids)).abs().max() < 1e-5
        old = [m.old_logprobs for m in step.micro]
        if step is watch.steps[0]:  # in the first update old is current, to the last bit
            assert old == [None] * len(old)
            continue
        assert all(o is not None and len(o) == len(m.targets) for o, m in zip(old, step.micro, strict=True))
    assert [m["rollout/staleness_max"] for m in watch.logged] == [0.0] * 12
    assert all(s.measured == watch.steps[i // 6 * 6].measured for i, s in enumerate(watch.steps))


def test_the_first_step_on_reused_rollouts_clips_nothing_and_later_ones_do() -> None:
    data = tiny_data(group_size=4, epochs_per_rollout=3)
    watch = fit(data, tiny_module(lr=5e-2, clip_ratio_low=0.01, clip_ratio_high=0.01), max_steps=3)
    clipped = [m["train/clip_frac"] for m in watch.logged]
    assert clipped[0] == 0
    assert max(clipped[1:]) > 0


def test_a_run_repeats_itself_and_a_second_fit_begins_at_the_first_prompt() -> None:
    data, other = tiny_data(), tiny_data()
    runs = [fit(d, tiny_module(), max_steps=3).sampled for d in (data, data, other)]
    assert runs[0] == runs[1] == runs[2]
    assert fit(tiny_data(seed=2), max_steps=3).sampled != runs[0]
    unshuffled = fit(tiny_data([row(i) for i in range(6)], shuffle=False), max_steps=3)
    ids = tiny_tokenizer()([row(i) for i in range(6)])["input_ids"]
    assert [p for prompts in unshuffled.trained for p in prompts] == [tuple(i) for i in ids]


def test_samples_differ_between_completions_and_steps() -> None:
    watch = fit(tiny_data(["w5", "w5"], group_size=4, max_completion_tokens=8), tiny_module(lr=0.0), max_steps=2)
    everything = [s for step in watch.sampled for s in step]
    assert len(set(everything)) == len(everything) == 16


def test_deterministic_samples_do_not_depend_on_the_batch() -> None:
    """A seed for each completion: a prompt at the same place gets the same samples, whatever is beside it."""
    found = []
    for prompts in (["w5", "w6"], ["w5", "w9 w8 w7"]):
        data = tiny_data(prompts, shuffle=False, deterministic=True, group_size=3, max_completion_tokens=6)
        found.append(fit(data, max_steps=1).sampled[0])
    assert found[0][:3] == found[1][:3]
    assert len(set(found[0])) == 6


# -- validation -------------------------------------------------------------------------------------------------------


def index_reward(completion: str, answer: str) -> float:
    return float(answer)


@pytest.mark.parametrize("size", [None, 4, 1, 100])
def test_b31_every_validation_row_is_scored_once(size: int | None) -> None:
    rows = [{"prompt": row(i), "answer": str(i)} for i in range(10)]
    watch = Watch()
    trainer = quiet_trainer(callbacks=[watch])
    data = tiny_data(reward=index_reward, val_prompts=rows, val_batch_size=size)
    (logged,) = trainer.validate(tiny_module(), data, verbose=False)
    assert sorted(g.prompt.index for b in watch.validated for g in b.groups) == list(range(10))
    assert [len(b.groups) for b in watch.validated] == {None: [10], 4: [4, 4, 2], 1: [1] * 10, 100: [10]}[size]
    assert logged["val/reward"] == pytest.approx(4.5)
    assert logged["val/pass@1"] == pytest.approx(0.9)


def test_validation_keeps_whole_groups_and_is_greedy_by_default() -> None:
    watch = Watch()
    trainer = quiet_trainer(callbacks=[watch])
    rows = [{"prompt": row(i), "answer": "1"} for i in range(3)]
    data = tiny_data(reward=index_reward, val_prompts=rows, val_batch_size=2, val_group_size=3)
    trainer.validate(tiny_module(), data, verbose=False)
    groups = [g for b in watch.validated for g in b.groups]
    assert [len(g.rollouts) for g in groups] == [3, 3, 3]
    model = tiny_model()
    for group in groups:
        assert len({tuple(r.completion_ids) for r in group.rollouts}) == 1
        ids = torch.tensor([group.prompt.token_ids])
        assert group.rollouts[0].completion_ids[0] == int(model(ids).logits[0, -1].argmax())


def test_an_unscored_validation_row_is_left_out_of_the_mean() -> None:
    def abstains(completion: str, answer: str) -> float | None:
        return None if answer == "0" else 1.0

    rows = [{"prompt": row(i), "answer": str(i)} for i in range(3)]
    for size in (None, 1):
        data = tiny_data(reward=abstains, val_prompts=rows, val_batch_size=size)
        assert quiet_trainer().validate(tiny_module(), data, verbose=False) == [{"val/reward": 1.0, "val/pass@1": 1.0}]


def test_predict_returns_the_scored_rollouts() -> None:
    data = tiny_data(reward=index_reward, val_prompts=[{"prompt": row(i), "answer": str(i)} for i in range(3)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (found,) = quiet_trainer().predict(tiny_module(), data)
    assert [(type(r), r.reward) for r in found] == [(Rollout, 0.0), (Rollout, 1.0), (Rollout, 2.0)]


# -- two ranks --------------------------------------------------------------------------------------------------------


def only_on_rank_0(completions: list[str]) -> list[float | None]:
    return [float(i) if rank() == 0 else None for i in range(len(completions))]


class Scalar(RLModule):
    """A number as metric: a rank with nothing live must name it too, or the ranks would not reduce the same."""

    def loss(self, batch: Any, logprobs: Any) -> Any:
        loss, metrics = super().loss(batch, logprobs)
        return loss, metrics | {"my/number": 2.0}


@pytest.mark.slow
def test_b31_two_ranks_score_and_train_every_row_once(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "tests.test_datamodule", str(tmp_path)], check=True, timeout=240)
    found = [json.loads((tmp_path / f"{i}.json").read_text()) for i in range(2)]
    assert {f["val/reward"] for f in found} == {2.0}, "B31"
    assert sorted(i for f in found for i in f["validated"]) == [0, 1, 2, 3, 4]
    trained = [prompt for f in found for step in f["trained"] for prompt in step]
    assert [len(step) for f in found for step in f["trained"]] == [2] * 6
    assert len({tuple(p) for p in trained}) == len(trained) == 12, "each prompt on one rank"
    assert found[0]["global_step"] == found[1]["global_step"] == 3
    assert found[0]["one_rank_live"] == found[1]["one_rank_live"]
    assert found[0]["one_rank_live"] == {"my/number": 2.0, "reward/mean": 1.5, "reward/excluded_frac": 0.5}


def two_ranks(folder: Path) -> None:
    rows = [{"prompt": row(i), "answer": str(i)} for i in range(12)]
    watch = Watch()
    data = tiny_data(rows, index_reward, prompts_per_step=4, val_prompts=rows[:5], val_batch_size=2)
    trainer = quiet_trainer(devices=2, max_epochs=1, callbacks=[watch])
    trainer.fit(tiny_module(), data)
    found: dict[str, Any] = {"val/reward": float(trainer.callback_metrics["val/reward"])}
    found |= {"trained": watch.trained, "global_step": trainer.global_step}
    found["validated"] = [g.prompt.index for b in watch.validated for g in b.groups]
    idle = Watch()
    data = tiny_data(rows, only_on_rank_0, prompts_per_step=4)
    quiet_trainer(devices=2, max_steps=1, callbacks=[idle]).fit(Scalar(tiny_model(), lr=1e-3), data)
    found["one_rank_live"] = {n: idle.logged[0][n] for n in ("my/number", "reward/mean", "reward/excluded_frac")}
    (folder / f"{rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    two_ranks(Path(sys.argv[1]))
