"""The algorithm: its arguments, its advantages, what a checkpoint holds, and how a user overrides it."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightrl import RLModule
from lightrl.corrections import TruncatedToken
from lightrl.packing import MicroBatch, pack
from lightrl.policy import load_policy
from lightrl.types import Rollout, RolloutBatch
from tests.helpers.tiny import batch_of, by_hand, save_tiny, tiny_model
from tests.helpers.training import Steps, equal, quiet_trainer, tiny_data, tiny_module, weights


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"aggregation": "mean"},
        {"schedule": "exponential"},
        {"lr": -1e-6},
        {"lr": float("nan")},
        {"kl_coef": -0.1},
        {"clip_ratio_low": -0.1},
        {"clip_ratio_low": 1.0},
        {"clip_ratio_high": -0.2},
        {"warmup_steps": -1},
        {"weight_decay": -0.1},
        {"betas": (0.9, 1.0)},
        {"betas": (0.9,)},
        {"betas": 0.9},
        {"lr": float("inf")},
        {"lr": "1e-3"},
        {"kl_coef": float("nan")},
        {"kl_coef": float("inf")},
        {"entropy_coef": float("nan")},
        {"entropy_coef": float("inf")},
        {"weight_decay": float("inf")},
        {"clip_ratio_high": float("nan")},
        {"warmup_steps": 1.5},
        {"warmup_steps": True},
        {"ref_refresh_every": 0.5},
        {"correction": 3},
        {"correction": TruncatedToken},
        {"aggregation": None},
    ],
    ids=str,
)
def test_arguments_out_of_range_are_named_with_their_value(wrong: dict[str, Any]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r}")):
        RLModule("no/such/model", **wrong)


def test_numbers_of_other_kinds_and_no_upper_clip_are_taken() -> None:
    module = RLModule(
        "no/such/model", lr=1, warmup_steps=np.int64(2), kl_coef=np.float32(0.1), clip_ratio_high=float("inf")
    )
    assert module.clip_ratio_high == float("inf")


class WrongLoss(RLModule):
    found: Any

    def loss(self, batch: MicroBatch, logprobs: Tensor) -> Any:
        return self.found(-logprobs * batch.advantages)


@pytest.mark.parametrize(
    ("found", "named"),
    [
        (lambda terms: (terms, {}), "(a tensor of shape [5], a dict)"),
        (lambda terms: terms.sum(), "a tensor of shape []"),
        (lambda terms: (terms.sum(), None), "(a tensor of shape [], a NoneType)"),
        (lambda terms: (float(terms.sum().detach()), {}), "(a float, a dict)"),
        (lambda terms: (terms.sum(), {}, 1), "(a tensor of shape [], a dict, a int)"),
    ],
)
def test_a_loss_that_returns_something_else_is_told_what_to_return(found: Any, named: str) -> None:
    module = WrongLoss(tiny_model(layers=1))
    module.found = found
    module.configure_model()
    micro = pack([Rollout([3], [4] * 5, torch.zeros(5), advantage=1.0)], temperature=1.0)
    message = re.escape(f"WrongLoss.loss returned {named}: it must return a scalar tensor (self.aggregate")
    with pytest.raises(ValueError, match=message):
        module.full_loss(micro)


class WrongAdvantages(RLModule):
    found: Any

    def estimate(self, rewards: Tensor, group_ids: Tensor, batch: RolloutBatch) -> Any:
        return self.found


@pytest.mark.parametrize(
    ("found", "named"),
    [
        (torch.zeros(3), r"shape \[3\]"),
        (torch.zeros(()), r"shape \[\]"),
        (torch.zeros(4, 2), r"shape \[4, 2\]"),
        ([0.0] * 4, "a list"),
    ],
)
def test_advantages_of_another_shape_are_told_the_right_one(found: Any, named: str) -> None:
    module = WrongAdvantages("no/such/model")
    module.found = found
    with pytest.raises(ValueError, match=rf"WrongAdvantages.estimate returned {named}: .* shape \[4\], one advantage"):
        module.advantages(with_rewards([1.0, 0.0, 1.0, 0.0], [0, 0, 1, 1]))


def with_rewards(rewards: list[float | None], group_ids: list[int]) -> RolloutBatch:
    return batch_of(
        [Rollout([3], [4], torch.zeros(1), reward=r, group_id=g) for r, g in zip(rewards, group_ids, strict=True)]
    )


def test_advantages_are_z_scores_of_the_group() -> None:
    batch = with_rewards([1.0, 0.0, 0.0, 1.0, 5.0, 5.0], [0, 0, 0, 0, 1, 1])
    tiny_module().advantages(batch)
    assert [r.advantage for r in batch] == pytest.approx([0.8660, -0.8660, -0.8660, 0.8660, 0.0, 0.0], abs=1e-3)
    tiny_module(scale_rewards=False).advantages(batch)
    assert [r.advantage for r in batch] == [0.5, -0.5, -0.5, 0.5, 0.0, 0.0]


@pytest.mark.parametrize("scale", [True, False])
def test_b01_an_unscored_rollout_moves_no_sibling(scale: bool) -> None:
    module = tiny_module(scale_rewards=scale)
    batch = with_rewards([1.0, 1.0, None, 0.0], [0] * 4)
    module.advantages(batch)
    alone = with_rewards([1.0, 1.0, 0.0], [0] * 3)
    module.advantages(alone)
    found = [r.advantage for r in batch]
    assert found[2] == 0.0
    assert [found[i] for i in (0, 1, 3)] == [r.advantage for r in alone]
    if not scale:
        assert found == pytest.approx([1 / 3, 1 / 3, 0.0, -2 / 3])


def test_b01_an_unscored_rollout_is_not_trained_on() -> None:
    """A reward that abstains on every second completion: half the tokens are gone from the step, and from its mean."""

    def abstains(completions: list[str]) -> list[float | None]:
        return [None if i % 2 else float(i) for i in range(len(completions))]

    module, seen = tiny_module(), Steps()
    quiet_trainer(max_steps=1, callbacks=[seen]).fit(module, tiny_data(reward=abstains, group_size=4))
    (step,) = seen.steps
    assert [r.reward for r in step.rollouts] == [0.0, 2.0, 4.0, 6.0]
    assert sum(len(m.targets) for m in step.micro) == sum(len(r.completion_ids) for r in step.rollouts)
    assert step.measured["reward/mean"] == (12.0, 4.0)
    assert step.measured["reward/excluded_frac"] == (4.0, 8.0)


def test_load_from_checkpoint_gives_equal_parameters(tiny_folder: Path, tmp_path: Path) -> None:
    module = RLModule(tiny_folder, lr=1e-2, kl_coef=0.1, clip_ratio_high=0.3)
    save = ModelCheckpoint(tmp_path, save_last=True)
    quiet_trainer(max_steps=1, callbacks=[save], enable_checkpointing=True).fit(module, tiny_data())
    loaded = RLModule.load_from_checkpoint(tmp_path / "last.ckpt")
    trained = weights(module.policy)
    assert not equal(trained, weights(load_policy(tiny_folder)))
    assert equal(weights(loaded.policy), trained)
    assert loaded.reference is not None
    assert equal(weights(loaded.reference), weights(load_policy(tiny_folder)))
    assert (loaded.lr, loaded.kl_coef, loaded.clip_ratio_high) == (1e-2, 0.1, 0.3)


class Watched(RLModule):
    """Adds metrics to the loss: one by token, one number, one that is nowhere defined."""

    seen: list[Tensor]

    def loss(self, batch: MicroBatch, logprobs: Tensor) -> tuple[Tensor, dict[str, Tensor | float]]:
        loss, metrics = super().loss(batch, logprobs)
        self.seen.append(batch.targets)
        extra = {"my/token": batch.targets.float(), "my/size": float(len(batch.targets)), "my/nan": float("nan")}
        return loss, metrics | extra


def test_a_users_metrics_are_means_over_tokens_across_micro_batches() -> None:
    module, seen = Watched(tiny_model(), lr=1e-3), Steps()
    module.seen = []
    data = tiny_data(group_size=4, max_completion_tokens=6, max_tokens_per_micro_batch=14)
    quiet_trainer(max_steps=1, callbacks=[seen]).fit(module, data)
    sizes = {len(t) for t in module.seen}
    assert len(module.seen) > 2
    assert len(sizes) > 1, "equal micro-batches would not tell a mean of means"
    tokens = torch.cat(module.seen).double()
    (logged,) = seen.logged
    assert logged["my/token"] == pytest.approx(float(tokens.mean()), rel=1e-6)
    assert logged["my/size"] == pytest.approx(sum(len(t) ** 2 for t in module.seen) / len(tokens), rel=1e-6)
    assert "my/nan" not in logged


class Reinforce(RLModule):
    def advantages(self, batch: RolloutBatch) -> None:
        for r in batch:
            r.advantage = 1.0

    def loss(self, batch: MicroBatch, logprobs: Tensor) -> tuple[Tensor, dict[str, Tensor | float]]:
        return self.aggregate(-batch.advantages * logprobs, batch), {}


def test_another_loss_and_other_advantages_are_what_is_trained() -> None:
    seen = Steps()
    module = Reinforce(tiny_model(), lr=1e-3)
    quiet_trainer(max_steps=1, callbacks=[seen]).fit(module, tiny_data())
    (logged,), (step,) = seen.logged, seen.steps
    rollouts = step.rollouts
    right = torch.cat([by_hand(tiny_model(), r.prompt_ids, r.completion_ids) for r in rollouts])
    assert logged["train/loss"] == pytest.approx(-float(right.mean()), abs=1e-5)
    assert "train/clip_frac" not in logged


def test_the_loss_logged_is_the_steps_whatever_the_cut() -> None:
    found: list[dict[str, float]] = []
    for budget in (14, 1000):
        seen = Steps()
        data = tiny_data(group_size=4, max_completion_tokens=6, max_tokens_per_micro_batch=budget)
        quiet_trainer(max_steps=1, callbacks=[seen]).fit(Reinforce(tiny_model(), lr=1e-3), data)
        found.append(seen.logged[0])
        assert (len(seen.steps[0].micro) > 1) == (budget == 14)
    for name in ("train/loss", "train/entropy", "train/grad_norm"):
        assert found[0][name] == pytest.approx(found[1][name], rel=1e-4)
