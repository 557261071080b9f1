"""Every validation row is scored once, on one rank or on two, which train on each prompt once."""

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from lightrl import RLModule, Rollout
from lightrl.distributed import rank
from tests.helpers.tiny import row, tiny_model
from tests.helpers.training import Steps, quiet_trainer, tiny_data, tiny_module


def index_reward(completion: str, answer: str) -> float:
    return float(answer)


@pytest.mark.parametrize("size", [None, 4, 1, 100])
def test_b31_every_validation_row_is_scored_once(size: int | None) -> None:
    rows = [{"prompt": row(i), "answer": str(i)} for i in range(10)]
    watch = Steps()
    trainer = quiet_trainer(callbacks=[watch])
    data = tiny_data(reward=index_reward, val_prompts=rows, val_batch_size=size)
    (logged,) = trainer.validate(tiny_module(), data, verbose=False)
    assert sorted(g.prompt.index for b in watch.validated for g in b.groups) == list(range(10))
    assert [len(b.groups) for b in watch.validated] == {None: [10], 4: [4, 4, 2], 1: [1] * 10, 100: [10]}[size]
    assert logged["val/reward"] == pytest.approx(4.5)
    assert logged["val/pass@1"] == pytest.approx(0.9)


def test_validation_keeps_whole_groups_and_is_greedy_by_default() -> None:
    watch = Steps()
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


def only_on_rank_0(completions: list[str]) -> list[float | None]:
    return [float(i) if rank() == 0 else None for i in range(len(completions))]


class Scalar(RLModule):
    """A number as metric: a rank with nothing live must name it too, or the ranks would not reduce the same."""

    def loss(self, batch: Any, logprobs: Any) -> Any:
        loss, metrics = super().loss(batch, logprobs)
        return loss, metrics | {"my/number": 2.0}


@pytest.mark.slow
def test_b31_two_ranks_score_and_train_every_row_once(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "tests.test_validation", str(tmp_path)], check=True, timeout=240)
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
    watch = Steps()
    data = tiny_data(rows, index_reward, prompts_per_step=4, val_prompts=rows[:5], val_batch_size=2)
    trainer = quiet_trainer(devices=2, max_epochs=1, callbacks=[watch])
    trainer.fit(tiny_module(), data)
    found: dict[str, Any] = {"val/reward": float(trainer.callback_metrics["val/reward"])}
    found |= {"trained": watch.trained, "global_step": trainer.global_step}
    found["validated"] = [g.prompt.index for b in watch.validated for g in b.groups]
    idle = Steps()
    data = tiny_data(rows, only_on_rank_0, prompts_per_step=4)
    quiet_trainer(devices=2, max_steps=1, callbacks=[idle]).fit(Scalar(tiny_model(), lr=1e-3), data)
    found["one_rank_live"] = {n: idle.logged[0][n] for n in ("my/number", "reward/mean", "reward/excluded_frac")}
    (folder / f"{rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    two_ranks(Path(sys.argv[1]))
