"""Evaluation with samples of its own: the same numbers on any number of ranks, and no trace of it in training."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback

from lightrl.callbacks import RolloutEvaluation, RolloutLogger
from lightrl.distributed import rank
from lightrl.evaluation import majority_at_k, pass_at_k
from lightrl.strategies import ColocatedVLLMStrategy
from lightrl.types import RolloutBatch
from tests.helpers import fits
from tests.helpers.tiny import tiny_model, tiny_prompts
from tests.helpers.training import equal, quiet_trainer, tiny_data, tiny_module, weights

KS = [1, 2, 4]


def first_word_is_even(completion: str) -> float:
    return float(completion.split()[:1] in (["w4"], ["w6"], ["w8"], ["w10"], ["w12"], ["w14"], ["w16"], ["w18"]))


def first_word(completion: str) -> str | None:
    return completion.split()[0] if completion.split() else None


class Seen(Callback):
    def __init__(self) -> None:
        self.batches: list[RolloutBatch] = []

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        self.batches.append(batch)


def evaluate(devices: int = 1, *others: Callback, **args: Any) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Validate 7 prompts in batches of 2 a rank; return what was logged and what was sampled on this rank."""
    seen, evaluation = Seen(), RolloutEvaluation(KS, samples=5, answer=first_word)
    data = tiny_data(reward=first_word_is_even, val_prompts=tiny_prompts(7), val_batch_size=2, deterministic=True)
    trainer = quiet_trainer(devices=devices, callbacks=[evaluation, seen, *others], **args)
    (logged,) = trainer.validate(tiny_module(), data, verbose=False)
    groups = [g for batch in seen.batches for g in batch.groups]
    rows = [{"index": g.prompt.index, "samples": [(first_word(r.text), r.reward) for r in g.rollouts]} for g in groups]
    return logged, rows


def by_count(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Every metric, straight from the samples."""
    samples = [[(answer, reward >= 1) for answer, reward in row["samples"]] for row in rows]
    found = {"val/mean@5": sum(sum(right for _, right in s) / len(s) for s in samples) / len(samples)}
    for k in KS:
        found[f"val/pass@{k}"] = sum(pass_at_k(5, sum(r for _, r in s), k) for s in samples) / len(samples)
        found[f"val/maj@{k}"] = sum(majority_at_k(s, k) for s in samples) / len(samples)
    return found | {"val/num_prompts": float(len(rows)), "val/num_completions": 5.0 * len(rows)}


def test_the_last_incomplete_batch_weighs_by_its_prompts() -> None:
    logged, rows = evaluate()
    assert [row["index"] for row in rows] == list(range(7))
    right = by_count(rows)
    assert {name: logged[name] for name in right} == pytest.approx(right, abs=1e-6)
    assert 0 < right["val/pass@1"] < right["val/pass@4"]
    assert logged["val/reward"] == pytest.approx(right["val/mean@5"])  # the module's own metric is of the same samples


@pytest.mark.slow
def test_b31_two_ranks_with_seven_prompts_have_the_numbers_of_one(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.callbacks.test_rollout_evaluation", str(tmp_path)]
    subprocess.run(command, check=True, timeout=240)
    found = [json.loads((tmp_path / f"{i}.json").read_text()) for i in range(2)]
    rows = sorted((row for f in found for row in f["rows"]), key=lambda row: row["index"])
    assert [row["index"] for row in rows] == list(range(7))
    kept = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    answers = sorted(answer or "" for row in rows for answer, _ in row["samples"])
    assert sorted(first_word(r["completion"]) or "" for r in kept) == answers, "both ranks' samples are in one file"
    right = by_count(rows)
    alone, _ = evaluate()
    for logged in (found[0]["logged"], found[1]["logged"], alone):
        assert {name: logged[name] for name in right} == pytest.approx(right, abs=1e-6)


def training(strategy: Any, make_module: Callable[[], Any], validating: bool) -> tuple[Any, list[Any]]:
    """Train five steps with each rollout batch used three times; validate, or not, in the middle of it."""
    evaluation = RolloutEvaluation(2, temperature=0.7, top_p=0.9, max_completion_tokens=9)
    options: dict[str, Any] = {"val_check_interval": 2, "check_val_every_n_epoch": None, "num_sanity_val_steps": 1}
    data = tiny_data(minibatches_per_rollout=3, group_size=3, val_prompts=tiny_prompts(3) if validating else None)
    tokens: list[Any] = []

    class Keep(Callback):
        validations = 0

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            tokens.append([(r.completion_ids, r.rollout_logprobs.tolist()) for r in batch.rollouts])

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            self.validations += 1

    keep, module = Keep(), make_module()
    callbacks = [keep, evaluation] if validating else [keep]
    quiet_trainer(strategy=strategy, max_steps=5, callbacks=callbacks, **(options if validating else {})).fit(
        module, data
    )
    assert keep.validations == (3 if validating else 0)
    return weights(module.policy), tokens


def assert_validation_leaves_no_trace(make_strategy: Callable[[], Any]) -> None:
    plain, sampled = training(make_strategy(), tiny_module, validating=False)
    validated, sampled_too = training(make_strategy(), tiny_module, validating=True)
    assert sampled == sampled_too
    assert equal(plain, validated)


def test_validation_amid_reused_rollouts_changes_nothing() -> None:
    assert_validation_leaves_no_trace(lambda: "colocated_hf")


@pytest.mark.vllm
def test_validation_amid_reused_rollouts_changes_nothing_with_vllm() -> None:
    assert_validation_leaves_no_trace(lambda: "colocated_vllm")


@pytest.mark.vllm
def test_validation_does_not_move_the_schedule_of_the_pushes() -> None:
    """Rollouts at steps 0 and 3, of weights at most one step old: validating at 2 must not make them those of 2."""
    assert_validation_leaves_no_trace(lambda: ColocatedVLLMStrategy(sleep=False, sync_every=2))


@pytest.mark.vllm
def test_vllm_samples_as_the_evaluation_says() -> None:
    seen = Seen()
    evaluation = RolloutEvaluation(3, top_k=1, max_completion_tokens=40)
    data = fits.tiny_data(max_completion_tokens=3, val_prompts=tiny_prompts(4))
    trainer = fits.quiet_trainer(callbacks=[evaluation, seen])
    (logged,) = trainer.validate(fits.RLModule(tiny_model()), data, verbose=False)
    groups = [g for batch in seen.batches for g in batch.groups]
    assert [len(g.rollouts) for g in groups] == [3] * 4
    assert all(len({tuple(r.completion_ids) for r in g.rollouts}) == 1 for g in groups), "top_k=1 is greedy"
    assert max(len(r.completion_ids) for g in groups for r in g.rollouts) > 3, "its own token budget"
    assert (logged["val/num_prompts"], logged["val/num_completions"]) == (4.0, 12.0)
    assert logged["val/mean@3"] == pytest.approx(logged["val/reward"])


def test_a_term_says_what_is_right() -> None:
    rewards = {"right": lambda completion: 1.0, "short": (lambda completion: -1.0, 0.5)}
    data = tiny_data(reward=rewards, val_prompts=tiny_prompts(2))
    trainer = quiet_trainer(callbacks=[RolloutEvaluation(2, term="right")])
    (logged,) = trainer.validate(tiny_module(), data, verbose=False)
    assert (logged["val/mean@2"], logged["val/pass@2"], logged["val/maj@2"]) == (0.5, 1.0, 1.0)
    trainer = quiet_trainer(callbacks=[RolloutEvaluation(2, term="rigth")])
    with pytest.raises(ValueError, match="term='rigth' is no reward's name: there are right, short"):
        trainer.validate(tiny_module(), data, verbose=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": 16, "samples": 8}, "k=16 is more than samples=8"),
        ({"k": 0}, "k=0 must be at least 1"),
        ({"k": []}, "k=\\[\\]: name at least one"),
        ({"k": 4, "temperature": 0}, "4 samples would be copies of one"),
        ({"answer": "lightrl.rewards.no_such"}, "answer"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RolloutEvaluation(**arguments)


def test_predict_keeps_to_the_datamodules_settings() -> None:
    data = tiny_data(val_prompts=tiny_prompts(3), val_group_size=2)
    found = quiet_trainer(callbacks=[RolloutEvaluation(4)]).predict(tiny_module(), data)
    assert sum(map(len, found)) == 3 * 2


def test_two_evaluations_are_refused() -> None:
    trainer = quiet_trainer(callbacks=[RolloutEvaluation(1), RolloutEvaluation(2)])
    with pytest.raises(ValueError, match="2 RolloutEvaluation callbacks"):
        trainer.validate(tiny_module(), tiny_data(val_prompts=tiny_prompts(1)), verbose=False)


def test_an_evaluation_without_prompts_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to evaluate on: give RolloutDataModule val_prompts="):
        quiet_trainer(callbacks=[RolloutEvaluation(1)], max_steps=1).fit(tiny_module(), tiny_data())


def test_an_evaluation_longer_than_the_context_is_refused() -> None:
    trainer = quiet_trainer(callbacks=[RolloutEvaluation(1, max_completion_tokens=128)])
    with pytest.raises(ValueError, match="max_completion_tokens=128 leaves no room for a prompt"):
        trainer.validate(tiny_module(), tiny_data(val_prompts=tiny_prompts(1)), verbose=False)


if __name__ == "__main__":
    logged, rows = evaluate(2, RolloutLogger(rows=None), default_root_dir=sys.argv[1])
    (Path(sys.argv[1]) / f"{rank()}.json").write_text(json.dumps({"logged": logged, "rows": rows}))
