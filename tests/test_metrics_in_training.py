"""What a step logs is one mean over all its tokens: of every micro-batch, mini-batch and rank."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from lightrl import RLModule
from lightrl.distributed import rank
from tests.helpers.tiny import tiny_model, tiny_prompts
from tests.helpers.training import quiet_trainer, tiny_data

NAN_TOKEN = 7


def measure_of(token: int) -> float:
    """NaN for one token of the vocabulary: what a metric may hold where it is not defined."""
    return math.nan if token == NAN_TOKEN else token**2 / 10


class Measured(RLModule):
    def loss(self, batch: Any, logprobs: Any) -> Any:
        loss, metrics = super().loss(batch, logprobs)
        values = batch.targets.float().square() / 10
        return loss, metrics | {"my/tokens": torch.where(batch.targets == NAN_TOKEN, math.nan, values)}


class Steps(Callback):
    """This rank's completions in each step, how many micro-batches they were, and what was logged."""

    def __init__(self) -> None:
        self.completions: list[list[list[int]]] = []
        self.micro: list[int] = []
        self.logged: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.completions.append([r.completion_ids for r in batch.rollouts])
        self.micro.append(len(batch.micro))
        self.logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def train(devices: int) -> dict[str, Any]:
    steps = Steps()
    data = tiny_data(
        tiny_prompts(12),
        prompts_per_step=4,
        group_size=4,
        max_completion_tokens=9,
        epochs_per_rollout=2,
        minibatches_per_rollout=2,
        max_tokens_per_micro_batch=24,
    )
    quiet_trainer(devices=devices, max_steps=6, callbacks=[steps]).fit(Measured(tiny_model(), lr=1e-3), data)
    return {"completions": steps.completions, "micro": steps.micro, "logged": steps.logged}


def check(ranks: list[dict[str, Any]]) -> None:
    assert all(n > 1 for r in ranks for n in r["micro"]), "several micro-batches, or nothing is shown"
    seen = 0
    for step in range(6):
        completions = [c for r in ranks for c in r["completions"][step]]
        tokens = [t for c in completions for t in c]
        values = [v for t in tokens if not math.isnan(v := measure_of(t))]
        seen += len(tokens) - len(values)
        for logged in (r["logged"][step] for r in ranks):
            assert logged["my/tokens"] == pytest.approx(sum(values) / len(values), rel=1e-6)
            assert logged["train/num_tokens"] == len(tokens)
            if step % 4 == 0:  # a new rollout batch, which four steps train on
                assert logged["rollout/num_completions"] == 16
    assert seen, "not one NaN among the tokens: nothing was shown"


def test_b29_under_reuse_and_micro_batches_one_mean_over_all_tokens() -> None:
    check([train(1)])


@pytest.mark.slow
def test_b29_two_ranks_log_one_mean_over_all_tokens(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "tests.test_metrics_in_training", str(tmp_path)], check=True, timeout=240)
    check([json.loads((tmp_path / f"{i}.json").read_text()) for i in range(2)])


if __name__ == "__main__":
    found = train(2)
    (Path(sys.argv[1]) / f"{rank()}.json").write_text(json.dumps(found))
