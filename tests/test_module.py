"""The algorithm: its arguments, advantages, scoring, reference, schedules, metrics and how a user overrides it."""

import csv
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from lightrl import RLModule, kl
from lightrl.corrections import TruncatedToken
from lightrl.optim import schedule_factor
from lightrl.packing import MicroBatch, StepBatch, pack
from lightrl.policy import load_policy
from lightrl.types import Prompt, Rollout, RolloutBatch, RolloutGroup
from tests.helpers.tiny import by_hand, random_rollouts, save_tiny, tiny_model, tiny_prompts
from tests.helpers.training import equal, quiet_trainer, tiny_data, tiny_module, weights


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


def batch_of(rollouts: list[Rollout], temperature: float = 1.0) -> RolloutBatch:
    groups = [[r for r in rollouts if r.group_id == g] for g in sorted({r.group_id for r in rollouts})]
    return RolloutBatch([RolloutGroup(Prompt([1]), g) for g in groups], temperature=temperature)


# -- advantages -----------------------------------------------------------------------------------------------------


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


class Steps(Callback):
    """Keeps every step's batch and what was logged with it."""

    def __init__(self) -> None:
        self.steps: list[StepBatch] = []
        self.logged: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: StepBatch, batch_idx: int) -> None:
        self.steps.append(batch)
        self.logged.append({name: float(v) for name, v in trainer.callback_metrics.items()})


# -- scoring and the reference --------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("max_tokens", [20, 1000])
def test_score_writes_logprobs_at_the_temperature(temperature: float, max_tokens: int) -> None:
    module = tiny_module(kl_coef=0.1)
    module.configure_model()
    with torch.no_grad():
        for p in module.policy.parameters():
            p.mul_(1.1)
    batch = batch_of(random_rollouts(6), temperature)
    module.score(batch, max_tokens=max_tokens, reused=True)
    for r in batch:
        now = by_hand(module.policy, r.prompt_ids, r.completion_ids, temperature)
        first = by_hand(tiny_model(), r.prompt_ids, r.completion_ids, temperature)
        assert r.scored_logprobs is not None
        assert r.ref_logprobs is not None
        assert r.scored_logprobs.dtype == torch.float32
        assert (r.scored_logprobs - now).abs().max() < 1e-5
        assert (r.ref_logprobs - first).abs().max() < 1e-5
        assert (now - first).abs().max() > 1e-3


def test_nothing_is_scored_that_nobody_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    module = tiny_module()
    module.configure_model()
    monkeypatch.setattr(module, "policy_forward", None)  # would fail
    batch = batch_of(random_rollouts(2))
    module.score(batch, max_tokens=100, reused=False)
    assert all(r.scored_logprobs is None and r.ref_logprobs is None for r in batch)


def test_there_is_no_reference_without_kl() -> None:
    module = tiny_module()
    module.configure_model()
    assert module.reference is None


def test_the_reference_is_frozen_and_apart() -> None:
    module = tiny_module(kl_coef=0.1)
    module.configure_model()
    assert module.reference is not None
    assert not any(p.requires_grad for p in module.reference.parameters())
    assert not module.reference.training
    own = {id(p) for p in module.parameters()}
    assert own == {id(p) for p in module.policy.parameters()}
    assert not own & {id(p) for p in module.reference.parameters()}
    assert set(module.state_dict()) == {f"policy.{name}" for name in module.policy.state_dict()}


def test_a_model_given_as_object_is_no_second_copy_in_the_checkpoint() -> None:
    module = tiny_module()
    assert not list(module.parameters())
    module.configure_model()
    assert module.policy is module.model
    assert set(module.state_dict()) == {f"policy.{name}" for name in module.policy.state_dict()}


def test_kl_is_zero_at_first_and_the_reference_stays() -> None:
    module, seen = tiny_module(kl_coef=0.5, lr=1e-2), Steps()
    quiet_trainer(max_steps=3, callbacks=[seen]).fit(module, tiny_data())
    kls = [m["kl/ref"] for m in seen.logged]
    assert abs(kls[0]) < 1e-9
    assert min(kls[1:]) > 1e-4
    assert module.reference is not None
    assert equal(weights(module.reference), weights(tiny_model()))


def test_the_kl_term_pulls_back_to_the_reference() -> None:
    module = tiny_module(kl_coef=1.0)
    module.configure_model()
    with torch.no_grad():
        for p in module.policy.parameters():
            p.add_(0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0)))
    rollouts = random_rollouts(8)
    for r in rollouts:
        r.advantage = 0.0
    batch = batch_of(rollouts)
    optimizer = torch.optim.SGD(module.policy.parameters(), lr=0.1)
    distances = []
    for _ in range(4):
        module.score(batch, max_tokens=1000, reused=False)
        micro = pack(rollouts, temperature=1.0, denominator=float(sum(len(r.completion_ids) for r in rollouts)))
        logprobs = module(micro)
        assert micro.ref_logprobs is not None
        distances.append(float(kl.k3(logprobs.detach(), micro.ref_logprobs).mean()))
        optimizer.zero_grad()
        module.loss(micro, logprobs)[0].backward()
        optimizer.step()
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < 0.8 * distances[0]


def test_a_masked_token_with_garbage_harms_nothing() -> None:
    module = tiny_module(kl_coef=0.5)
    module.configure_model()
    rollouts = random_rollouts(2)
    batch = batch_of(rollouts)
    module.score(batch, max_tokens=1000, reused=True)
    size = len(rollouts[0].completion_ids)
    assert size > 1
    rollouts[0].loss_mask = torch.arange(size) > 0
    for name in ("ref_logprobs", "scored_logprobs"):
        getattr(rollouts[0], name)[0] = float("nan")
    micro = pack(rollouts, temperature=1.0, denominator=5.0)
    loss, _ = module.loss(micro, module(micro))
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is None or p.grad.isfinite().all() for p in module.policy.parameters())


# -- learning rate --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "warmup_steps", "factors"),
    [
        ("constant", 0, [1, 1, 1, 1, 1, 1, 1]),
        ("constant", 3, [1 / 3, 2 / 3, 1, 1, 1, 1, 1]),
        ("linear", 0, [1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0]),
        ("linear", 2, [0.5, 1, 1, 0.75, 0.5, 0.25, 0]),
        ("cosine", 2, [0.5, 1, 1, 0.853553, 0.5, 0.146447, 0]),
    ],
)
def test_schedules(schedule: str, warmup_steps: int, factors: list[float]) -> None:
    factor = schedule_factor(schedule, warmup_steps, None if schedule == "constant" else 6)
    assert [factor(step) for step in range(7)] == pytest.approx(factors, abs=1e-6)


@pytest.mark.parametrize(
    ("arguments", "length", "factors"),
    [
        ({}, {"max_steps": 2}, [1, 1]),
        ({"warmup_steps": 2}, {"max_steps": 3}, [0.5, 1, 1]),
        ({"schedule": "linear"}, {"max_epochs": 2}, [1, 0.75, 0.5, 0.25]),  # 2 steps an epoch
    ],
    ids=str,
)
def test_the_learning_rate_of_each_optimizer_step(
    arguments: dict[str, Any], length: dict[str, int], factors: list[float], tmp_path: Path
) -> None:
    class Rates(LearningRateMonitor):
        used: list[float] = []

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            self.used.append(optimizer.param_groups[0]["lr"])

    rates, logger = Rates(logging_interval="step"), CSVLogger(tmp_path)
    rates.used = []
    module = tiny_module(lr=2e-3, **arguments)
    quiet_trainer(callbacks=[rates], logger=logger, **length).fit(
        module, tiny_data(tiny_prompts(4), max_completion_tokens=1)
    )
    assert rates.used == pytest.approx([2e-3 * f for f in factors])
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        logged = [float(v) for row in csv.DictReader(file) for k, v in row.items() if k == "lr-AdamW/pg1" and v]
    assert logged == pytest.approx(rates.used)


def test_schedules_that_end_need_an_end() -> None:
    with pytest.raises(ValueError, match="schedule='cosine' needs to know the run's length"):
        schedule_factor("cosine", 0, float("inf"))
    assert schedule_factor("linear", 0, 4)(9) == 0.0


def test_weight_decay_leaves_vectors_alone() -> None:
    module = tiny_module(weight_decay=0.1)
    module.configure_model()
    groups = module.configure_optimizers().param_groups
    assert [g["weight_decay"] for g in groups] == [0.1, 0.0]
    assert {p.ndim for p in groups[0]["params"]} == {2}
    assert {p.ndim for p in groups[1]["params"]} == {1}


# -- checkpoints, and what a user overrides ---------------------------------------------------------------------------


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


# -- metrics --------------------------------------------------------------------------------------------------------

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
