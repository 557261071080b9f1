"""The check that users run on their own loss."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightrl import RLModule
from lightrl.packing import MicroBatch
from lightrl.testing import gradient_cuts
from tests.helpers.tiny import random_rollouts, tiny_model
from tests.helpers.training import tiny_module


def rollouts(**args: Any) -> Any:
    made = random_rollouts(9, members=3, model=tiny_model(), **args)
    for r in made:
        r.ref_logprobs = r.rollout_logprobs.flip(0)
    return made


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_the_modules_own_losses_pass_and_nothing_is_left_behind(aggregation: str) -> None:
    module = tiny_module(aggregation=aggregation, kl_coef=0.1, entropy_coef=0.5)
    forward = module.policy_forward
    assert 0 < gradient_cuts(module, rollouts(), max_micro_batches=4) < 1e-5
    assert module.policy_forward is forward
    assert all(p.grad is None for p in module.policy.parameters())


class Mean(RLModule):
    def loss(self, batch: MicroBatch, logprobs: Tensor) -> Any:
        return -(logprobs * batch.advantages).mean(), {}


def test_a_mean_over_the_micro_batch_fails_naming_the_cut() -> None:
    with pytest.raises(AssertionError, match=r"2 micro-batches, padded: the gradient is off .*batch.denominator"):
        gradient_cuts(Mean(tiny_model()), rollouts())


class MeanEntropy(RLModule):
    def loss(self, batch: MicroBatch, logprobs: Tensor) -> Any:
        return -(logprobs * batch.advantages).sum() / batch.denominator, {}

    def aggregate(self, terms: Tensor, batch: MicroBatch) -> Tensor:
        return terms.mean()


def test_the_entropy_bonus_is_part_of_what_is_checked() -> None:
    assert gradient_cuts(MeanEntropy(tiny_model()), rollouts(), max_micro_batches=2) < 1e-5
    with pytest.raises(AssertionError, match="2 micro-batches, padded: the gradient is off"):
        gradient_cuts(MeanEntropy(tiny_model(), entropy_coef=0.5), rollouts(), max_micro_batches=2)


class MeanKL(RLModule):
    def loss(self, batch: MicroBatch, logprobs: Tensor) -> Any:
        loss, metrics = super().loss(batch, logprobs)
        return loss if batch.ref_logprobs is None else loss + (logprobs - batch.ref_logprobs).square().mean(), metrics


def test_a_kl_is_not_left_out_unnoticed() -> None:
    module, made = MeanKL(tiny_model(), kl_coef=0.5), rollouts()
    with pytest.raises(AssertionError, match="the gradient is off"):
        gradient_cuts(module, made)
    made[4].ref_logprobs = None
    with pytest.raises(ValueError, match=r"kl_coef=0.5 and rollouts without ref_logprobs"):
        gradient_cuts(module, made)
    assert gradient_cuts(tiny_module(kl_coef=0.5, kl_in_reward=True), made, max_micro_batches=2) < 1e-5


class Unshared(RLModule):
    def loss(self, batch: MicroBatch, logprobs: Tensor) -> Any:
        loss, metrics = super().loss(batch, logprobs)
        return loss * len(batch.input_ids) / batch.num_tokens, metrics


def test_a_loss_that_only_goes_wrong_with_shared_prefixes_fails_there() -> None:
    with pytest.raises(AssertionError, match="1 micro-batches, packed with shared prefixes: "):
        gradient_cuts(Unshared(tiny_model()), rollouts(), max_micro_batches=2)


def test_models_that_are_not_packed_are_checked_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightrl.policy.takes_packed_rows", lambda model: False)
    assert gradient_cuts(Unshared(tiny_model()), rollouts(), max_micro_batches=2) < 1e-5


def test_what_cannot_be_compared_is_an_error() -> None:
    for few in ([], rollouts()[:1]):
        with pytest.raises(ValueError, match=f"at least two rollouts to cut apart, got {len(few)}"):
            gradient_cuts(tiny_module(), few)
    with pytest.raises(ValueError, match="max_micro_batches=1 cuts nothing"):
        gradient_cuts(tiny_module(), rollouts(), max_micro_batches=1)
    idle = rollouts()
    for r in idle:
        r.advantage = 0.0
    with pytest.raises(ValueError, match="gradient is zero"):
        gradient_cuts(tiny_module(), idle)
    assert torch.is_grad_enabled()
