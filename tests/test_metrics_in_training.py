"""What a step logs is one mean over all its tokens: of every micro-batch, mini-batch and rank."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightrl import RLModule
from lightrl.distributed import rank
from tests.helpers.tiny import tiny_model, tiny_prompts
from tests.helpers.training import quiet_trainer, tiny_data, tiny_module

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


KEYS = {
    "train": ["loss", "grad_norm", "entropy", "clip_frac"],
    "reward": ["mean", "std", "zero_std_frac", "even", "length"],
    "kl": ["mismatch", "ref"],
    "rollout": ["length_mean", "truncated_frac", "staleness_mean", "staleness_max"],
    "time": ["generate", "reward", "weight_sync", "swap"],
    "perf": ["tokens_per_second"],
    "val": ["reward", "pass@1"],
}


def length(completion: str) -> float:
    return float(len(completion.split()))


def test_metric_keys_in_a_tensorboard_file(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    rewards: dict[str, Callable[..., float]] = {"even": lambda completion: float("w4" in completion), "length": length}
    data = tiny_data(reward=rewards, val_prompts=tiny_prompts(3))
    trainer = quiet_trainer(
        max_steps=4, logger=logger, val_check_interval=2, check_val_every_n_epoch=None, gradient_clip_val=1e9
    )
    trainer.fit(tiny_module(kl_coef=0.1), data)
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    keys = {f"{group}/{name}" for group, names in KEYS.items() for name in names}
    assert keys <= set(events.Tags()["scalars"])
    values = {key: [e.value for e in events.Scalars(key)] for key in keys}
    for key in keys:
        assert len(values[key]) == (2 if key.startswith("val/") else 4), key
        assert all(v == v and abs(v) < 1e6 for v in values[key]), key
    assert all(v > 0 for key in ("train/grad_norm", "train/entropy", "perf/tokens_per_second") for v in values[key])
    assert all(abs(v) < 1e-6 for v in values["kl/mismatch"])
    assert values["rollout/staleness_max"] == values["train/clip_frac"] == [0.0] * 4
    assert all(1 <= v <= 3 for v in values["rollout/length_mean"])


if __name__ == "__main__":
    found = train(2)
    (Path(sys.argv[1]) / f"{rank()}.json").write_text(json.dumps(found))
