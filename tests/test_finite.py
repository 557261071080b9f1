"""NaN and inf: harmless in a masked slot, an error that names step, rollout and tensor in a live one."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

from lightrl import RLModule
from lightrl.algorithms import RLOO
from lightrl.datamodule import SizedLoader
from lightrl.packing import MicroBatch, StepBatch, pack
from lightrl.types import Prompt, RolloutBatch, RolloutGroup
from tests.helpers.tiny import random_rollouts, tiny_model
from tests.helpers.training import equal, quiet_trainer, tiny_module, weights

pytestmark = pytest.mark.slow

NAMES = ("advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs")


def step(rollouts: list[Any]) -> StepBatch:
    """Three micro-batches, the last rollout's completion token 1 of the second masked."""
    for r in rollouts:
        r.ref_logprobs = r.rollout_logprobs.clone()
    micro = [pack(part, temperature=1.0, denominator=9.0) for part in (rollouts[:2], rollouts[2:4], rollouts[4:])]
    micro[1].advantages = micro[1].advantages.clone()
    micro[1].loss_mask[-1] = False
    return StepBatch(micro, 0, rollouts)


class Losses(Callback):
    def __init__(self) -> None:
        self.found: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.found.append(
            {k: float(v) for k, v in trainer.callback_metrics.items() if not k.startswith(("time", "perf"))}
        )


def train(module: RLModule, steps: list[StepBatch], strategy: str = "auto") -> list[dict[str, float]]:
    losses = Losses()
    loader = SizedLoader(len(steps), lambda i: steps[i])
    quiet_trainer(strategy=strategy, max_steps=len(steps), callbacks=[losses]).fit(module, loader)
    return losses.found


def steps() -> list[StepBatch]:
    return [step(random_rollouts(6, seed=s, model=tiny_model())) for s in (0, 3)]


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("strategy", ["auto", "colocated_hf"])
def test_a_masked_slot_reaches_neither_loss_nor_gradient(garbage: float, strategy: str) -> None:
    clean, dirty = steps(), steps()
    for name in NAMES:
        getattr(dirty[1].micro[1], name)[-1] = garbage
    modules = [tiny_module(kl_coef=0.1, entropy_coef=0.1) for _ in range(2)]
    found = [train(m, s, strategy) for m, s in zip(modules, (clean, dirty), strict=True)]
    assert found[0] == found[1]
    assert equal(*(weights(m.policy) for m in modules))
    assert not equal(weights(modules[0].policy), weights(tiny_model()))


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["logprobs", *NAMES])
def test_a_live_slot_is_named_before_the_weights_change(name: str, garbage: float) -> None:
    good, bad = steps()
    module, micro = tiny_module(kl_coef=0.1), bad.micro[1]
    rollout = bad.rollouts[3]
    slot = int((micro.sequence_ids == 0).sum()) + 1
    assert len(rollout.completion_ids) > 2, "the masked token is another one"
    if name == "logprobs":
        forward = module.policy_forward

        def broken(model: Any, batch: MicroBatch, **args: Any) -> tuple[Tensor, Tensor]:
            logprobs, entropy = forward(model, batch, **args)
            if torch.equal(batch.targets, micro.targets):
                logprobs = torch.where(torch.arange(len(logprobs)) == slot, garbage, logprobs)
            return logprobs, entropy

        module.policy_forward = broken
    else:
        getattr(micro, name)[slot] = garbage
    once = tiny_module(kl_coef=0.1)
    train(once, [good])
    tokens = [*rollout.prompt_ids, *rollout.completion_ids]
    shown = ", ".join(map(str, tokens[:8])) + (", ..." if len(tokens) > 8 else "")
    message = f"{name} is {garbage} at completion token 1 of rollout 3 (token ids {shown})"
    with pytest.raises(RuntimeError, match=r"step 1: .*" + re.escape(message)):
        train(module, [good, bad])
    assert equal(weights(module.policy), weights(once.policy))


def test_what_a_bad_step_was_made_of_is_written(tmp_path: Path) -> None:
    (_, bad), module = steps(), tiny_module(kl_coef=0.1)
    bad.micro[1].advantages[0] = math.nan
    loader = SizedLoader(1, lambda _: bad)
    with pytest.raises(RuntimeError, match=r"advantages is nan .* What the step was made of is in (\S+)\.$") as raised:
        quiet_trainer(max_steps=1, default_root_dir=tmp_path).fit(module, loader)
    path = tmp_path / "nonfinite-step=0-rank=0.pt"
    assert str(path) in str(raised.value)
    told = torch.load(path, weights_only=True)
    assert [r["completion_ids"] for r in told["rollouts"]] == [r.completion_ids for r in bad.rollouts]
    assert told["micro_batches"][1]["advantages"][0].isnan()
    assert len(told["micro_batches"]) == 3


@pytest.mark.parametrize("strategy", ["auto", "colocated_hf"])
def test_a_bad_step_can_be_skipped_and_is_counted(strategy: str) -> None:
    good, bad = steps()
    bad.micro[1].advantages[0] = math.nan
    args = {"kl_coef": 0.1, "on_nonfinite": "skip"}
    right, module = tiny_module(**args), tiny_module(**args)
    train(right, [good, good], strategy)
    found = train(module, [good, bad, good], strategy)
    assert [m["train/skipped_steps"] for m in found] == [0.0, 1.0, 1.0]
    assert all(math.isfinite(value) for metrics in found for value in metrics.values())
    assert equal(weights(module.policy), weights(right.policy))


class Overflowing(RLModule):
    """A finite loss whose gradient is not."""

    def loss(self, batch: MicroBatch, logprobs: Tensor) -> tuple[Tensor, dict[str, Tensor | float]]:
        loss, metrics = super().loss(batch, logprobs)
        return loss + (logprobs.sum() - logprobs.sum().detach()).abs().sqrt(), metrics


def test_a_gradient_that_is_not_finite_reaches_no_weight() -> None:
    (batch, _), module = steps(), Overflowing(tiny_model(), lr=1e-3)
    with pytest.raises(RuntimeError, match=r"step 0: the norm of the gradient is (nan|inf), though the loss is finite"):
        train(module, [batch])
    assert equal(weights(module.policy), weights(tiny_model()))
    module = Overflowing(tiny_model(), lr=1e-3, on_nonfinite="skip")
    train(module, [batch])
    assert equal(weights(module.policy), weights(tiny_model()))


class ClipsItself(RLModule):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """As Lightning's documentation has it: without the one of the class above."""


def test_a_hook_that_is_replaced_does_not_switch_the_check_off() -> None:
    (good, bad), module = steps(), ClipsItself(tiny_model(), lr=1e-3)
    bad.micro[1].advantages[0] = math.nan
    found = train(module, [good])
    assert math.isfinite(found[0]["train/loss"])
    before = weights(module.policy)
    with pytest.raises(RuntimeError, match="step 0: .*advantages is nan"):
        train(module, [bad])
    assert equal(weights(module.policy), before)


class Infinite(RLModule):
    def loss(self, batch: MicroBatch, logprobs: Tensor) -> tuple[Tensor, dict[str, Tensor | float]]:
        loss, metrics = super().loss(batch, logprobs)
        return loss / 0.0 if len(batch.sequences()) == 1 else loss, metrics


def test_a_loss_of_the_users_own_that_is_infinite_is_named() -> None:
    (batch, _), module = steps(), Infinite(tiny_model(), lr=1e-3)
    batch.micro[2] = pack(batch.rollouts[4:5], temperature=1.0, denominator=9.0)
    first = ", ".join(map(str, batch.rollouts[4].prompt_ids))
    with pytest.raises(
        RuntimeError, match=rf"step 0: .*loss is -?inf in the micro-batch that begins with rollout 4 .*{first}"
    ):
        train(module, [batch])
    assert equal(weights(module.policy), weights(tiny_model()))


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["ref_logprobs", "scored_logprobs"])
def test_the_kl_in_a_reward_is_named_before_it_hides_the_rollout(name: str, garbage: float) -> None:
    """A reward of NaN would count as none, and the rollout's advantage as 0."""
    module, (clean, dirty) = RLOO(tiny_model(), kl_coef=0.1), (steps()[0].rollouts for _ in range(2))
    for r in (clean[2], dirty[2]):
        r.loss_mask = torch.arange(len(r.completion_ids)) > 0
        getattr(r, name)[0] = garbage  # masked
    batches = [RolloutBatch([RolloutGroup(Prompt([1]), r)]) for r in (clean, dirty)]
    module.advantages(batches[0])
    assert all(math.isfinite(r.advantage) for r in clean)
    assert len({r.advantage for r in clean}) > 2
    getattr(dirty[3], name)[1] = garbage
    tensor, tokens = name.replace("scored", "old"), [*dirty[3].prompt_ids, *dirty[3].completion_ids]
    message = f"step 0: NaN or inf .* {tensor} is {garbage} at completion token 1 of rollout 3 .token ids {tokens[0]}, "
    with pytest.raises(RuntimeError, match=message):
        module.advantages(batches[1])
    dirty[3].reward = None  # nobody trains on it
    module.advantages(batches[1])
    dirty[1].ref_logprobs = None
    with pytest.raises(ValueError, match="kl_in_reward needs ref_logprobs"):
        module.advantages(batches[1])
