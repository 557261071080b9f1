"""PPO: its loss against the formula in float64, what the critic is told, and where its values come from."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightrl.algorithms import PPO
from lightrl.critic import value_terms, whitened
from lightrl.packing import MicroBatch, pack
from lightrl.testing import gradient_cuts
from lightrl.types import Prompt, Rollout, RolloutBatch, RolloutGroup
from tests.helpers.tiny import random_rollouts, tiny_model
from tests.helpers.training import equal, quiet_trainer, tiny_data, weights

# -- the value loss ---------------------------------------------------------------------------------------------------


def test_value_terms_by_hand() -> None:
    """Clip 0.2 around 1. Towards a return of 3: 2 is cut at 1.2, (1.8^2)/2. Away from it: 0.5 stays, (2.5^2)/2."""
    values = torch.tensor([2.0, 0.5, 1.1, math.nan]).requires_grad_()
    mask = torch.tensor([True, True, True, False])
    loss, metrics = value_terms(values, torch.ones(4), torch.full((4,), 3.0), clip_value=0.2, loss_mask=mask)
    assert loss.tolist() == pytest.approx([1.62, 3.125, 1.805, 0.0])
    assert metrics["clip_frac"].nan_to_num(-1).tolist() == [1.0, 0.0, 0.0, -1.0]
    loss.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([0.0, -2.5, -1.9, 0.0])
    unclipped = value_terms(values, torch.ones(4), torch.full((4,), 3.0), loss_mask=mask)[0]
    assert unclipped.tolist() == pytest.approx([0.5, 3.125, 1.805, 0.0])
    with pytest.raises(ValueError, match="clip_value=0"):
        value_terms(values, values, values, clip_value=0.0)


def test_whitened_by_hand() -> None:
    """Mean 2, unbiased std 1; the masked 9 is in neither."""
    found = whitened(torch.tensor([1.0, 9.0, 2.0, 3.0]), torch.tensor([True, False, True, True]))
    assert found.tolist() == pytest.approx([-1.0, 0.0, 0.0, 1.0])
    assert whitened(torch.full((3,), 5.0), torch.ones(3, dtype=torch.bool)).tolist() == [0.0] * 3
    assert whitened(torch.zeros(0), torch.zeros(0, dtype=torch.bool)).tolist() == []


# -- advantages and the loss ------------------------------------------------------------------------------------------


class GivenValues(PPO):
    """Values of its own choosing in place of a critic's."""

    given: Tensor

    def values(self, micro: MicroBatch) -> Tensor:
        return self.given


def scored_rollouts() -> list[Rollout]:
    draw = torch.Generator().manual_seed(0)
    rollouts = []
    for reward, size in ((1.0, 3), (0.0, 1), (0.5, 4), (None, 2)):
        now = -3 * torch.rand(size, generator=draw) - 0.1
        r = Rollout([3], [4] * size, now, reward=reward)
        r.scored_logprobs = now + 0.4 * torch.randn(size, generator=draw)
        r.ref_logprobs = now + 0.5 * torch.randn(size, generator=draw)
        r.values = torch.rand(size, generator=draw)
        r.token_rewards = 0.1 * torch.randn(size, generator=draw)
        rollouts.append(r)
    rollouts[2].loss_mask = torch.tensor([True, True, False, False])
    return rollouts


def batch_of(rollouts: list[Rollout]) -> RolloutBatch:
    return RolloutBatch([RolloutGroup(Prompt([3]), rollouts)])


def right_rewards(r: Rollout, kl_coef: float) -> list[float]:
    assert r.token_rewards is not None
    live = r.loss_mask.tolist() if r.loss_mask is not None else [True] * len(r.completion_ids)
    found = r.token_rewards.double().tolist()
    found[max(i for i, counts in enumerate(live) if counts)] += r.reward or 0.0
    for i, counts in enumerate(live):
        assert r.ref_logprobs is not None
        found[i] -= kl_coef * float(r.old_logprobs[i] - r.ref_logprobs[i]) * counts
    return found


def right_gae(r: Rollout, rewards: list[float], gamma: float, lam: float) -> tuple[list[float], list[float]]:
    """From the last live token backwards, as the definition reads."""
    assert r.values is not None
    live = [i for i in range(len(rewards)) if r.loss_mask is None or r.loss_mask[i]]
    advantages, returns, ahead, value_ahead = [0.0] * len(rewards), [0.0] * len(rewards), 0.0, 0.0
    for i in reversed(live if r.reward is not None else []):
        value = float(r.values[i])
        ahead = rewards[i] + gamma * value_ahead - value + gamma * lam * ahead
        advantages[i], returns[i], value_ahead = ahead, ahead + value, value
    return advantages, returns


@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
def test_advantages_and_returns_are_the_definition(kl_coef: float) -> None:
    rollouts = scored_rollouts()
    module = PPO(tiny_model(), gamma=0.9, lam=0.7, whiten=False, kl_coef=kl_coef)
    module.advantages(batch_of(rollouts))
    for r in rollouts:
        advantages, returns = right_gae(r, right_rewards(r, kl_coef), 0.9, 0.7)
        assert torch.as_tensor(r.advantage).tolist() == pytest.approx(advantages, abs=1e-6)
        assert r.returns is not None
        assert r.returns.tolist() == pytest.approx(returns, abs=1e-6)
    plain = [torch.as_tensor(r.advantage).clone() for r in rollouts]
    PPO(tiny_model(), gamma=0.9, lam=0.7, kl_coef=kl_coef).advantages(batch_of(rollouts))
    live = torch.cat([plain[0], plain[1], plain[2][:2]])
    for r, before in zip(rollouts[:2], plain[:2], strict=True):
        right = (before - live.mean()) / live.std()
        torch.testing.assert_close(torch.as_tensor(r.advantage), right, rtol=1e-4, atol=1e-5)


def test_a_rank_without_rollouts_takes_part() -> None:
    PPO(tiny_model()).advantages(RolloutBatch([]))


def test_loss_and_gradient_are_the_formula() -> None:
    rollouts = scored_rollouts()[:3]
    module = GivenValues(tiny_model(), value_coef=0.7, clip_value=0.1, whiten=False)
    module.advantages(batch_of(rollouts))
    micro = pack(rollouts, temperature=1.0, denominator=6.0)
    noise = 0.3 * torch.randn(8, generator=torch.Generator().manual_seed(1))
    assert micro.values is not None
    module.given = (micro.values + noise).requires_grad_()
    logprobs = micro.rollout_logprobs.clone().requires_grad_()
    loss, metrics = module.loss(micro, logprobs)
    loss.backward()

    now, values = logprobs.detach().double().requires_grad_(), module.given.detach().double().requires_grad_()
    right, at = torch.zeros((), dtype=torch.float64), 0
    for r in rollouts:
        advantages, returns = right_gae(r, right_rewards(r, 0.0), 1.0, 0.95)
        for i in range(len(r.completion_ids)):
            if r.loss_mask is None or r.loss_mask[i]:
                ratio = (now[at] - float(r.old_logprobs[i])).exp()
                right = right - torch.minimum(ratio * advantages[i], ratio.clamp(0.8, 1.2) * advantages[i])
                assert r.values is not None
                old = float(r.values[i])
                bounded = old + (values[at] - old).clamp(-0.1, 0.1)
                right = right + 0.35 * torch.maximum((values[at] - returns[i]) ** 2, (bounded - returns[i]) ** 2)
            at += 1
    (right / 6).backward()
    assert float(loss.detach()) == pytest.approx(float(right.detach()) / 6, rel=1e-5)
    for found, exact in ((logprobs, now), (module.given, values)):
        assert found.grad is not None
        assert exact.grad is not None
        assert exact.grad.abs().max() > 1e-3
        assert (found.grad - exact.grad).abs().max() < 1e-6
    assert 0 < float(metrics["critic/clip_frac"].nanmean()) < 1  # type: ignore[union-attr]


# -- the critic -------------------------------------------------------------------------------------------------------


def ready(**args: Any) -> PPO:
    module = PPO(tiny_model(), **args)
    module.configure_model()
    with torch.no_grad():
        module.value_head.weight.normal_(generator=torch.Generator().manual_seed(3))
    return module


def by_hand(module: PPO, r: Rollout) -> Tensor:
    trunk = module.value_trunk if module.critic == "own" else module.policy.model
    with torch.no_grad():
        states = trunk(torch.tensor([r.prompt_ids + r.completion_ids])).last_hidden_state[0]
        values = module.value_head(states)[:, 0]
    return values[len(r.prompt_ids) - 1 : -1]


@pytest.mark.parametrize("critic", ["shared", "own"])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("reused", [True, False])
def test_values_are_of_the_state_before_each_token(critic: Any, packed: bool, reused: bool) -> None:
    module = ready(critic=critic, packed=packed, kl_coef=0.1)
    batch = batch_of(random_rollouts(5))
    module.score(batch, max_tokens=30, reused=reused)
    for r in batch:
        assert r.values is not None
        assert (r.values - by_hand(module, r)).abs().max() < 1e-5
        assert (r.scored_logprobs is not None) == reused
        assert r.ref_logprobs is not None


@pytest.mark.parametrize("critic", ["shared", "own"])
def test_the_gradient_does_not_depend_on_the_cut(critic: Any) -> None:
    module = ready(critic=critic)
    rollouts = random_rollouts(6, members=3)
    batch = batch_of(rollouts)
    module.score(batch, max_tokens=1000, reused=True)
    module.advantages(batch)
    for r in rollouts:
        assert r.values is not None
        r.values = r.values + 0.5  # or the value loss would be clipped nowhere
    assert gradient_cuts(module, rollouts, max_micro_batches=3) < 1e-5


def test_each_part_has_its_learning_rate() -> None:
    module = ready(critic="own", lr=1e-3, critic_lr=1e-2)
    rates = {id(p): g["lr"] for g in module.configure_optimizers().param_groups for p in g["params"]}
    assert {rates.pop(id(p)) for p in module.policy.parameters()} == {1e-3}
    assert {rates.pop(id(p)) for m in module.companions() for p in m.parameters()} == {1e-2}
    assert not rates


@pytest.mark.parametrize("critic", ["shared", "own"])
def test_the_critic_learns_what_completions_are_worth(critic: Any) -> None:
    """Every completion is worth 0.7, and in the end so is every state."""

    def score(completion: str) -> float:
        return 0.7

    module = PPO(tiny_model(), critic=critic, lr=1e-4, critic_lr=1e-3, clip_value=None)
    trainer = quiet_trainer(max_steps=48)
    trainer.fit(module, tiny_data(reward=score, minibatches_per_rollout=2, epochs_per_rollout=2))
    assert float(trainer.callback_metrics["critic/return"]) == pytest.approx(0.7, abs=0.15)
    assert float(trainer.callback_metrics["critic/value"]) == pytest.approx(0.7, abs=0.15)
    assert float(trainer.callback_metrics["critic/loss"]) < 0.02


@pytest.mark.parametrize("critic", ["shared", "own"])
def test_resume_is_exact(critic: Any, tmp_path: Path) -> None:
    def fit(**args: Any) -> PPO:
        module = PPO(tiny_model(), critic=critic, lr=1e-3, critic_lr=1e-2)
        save = ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1, filename="{step}")
        trainer = quiet_trainer(max_steps=6, callbacks=[save], enable_checkpointing=True)
        trainer.fit(module, tiny_data(minibatches_per_rollout=2), **args)
        return module

    whole = fit()
    resumed = fit(ckpt_path=tmp_path / "step=3.ckpt")
    assert equal(weights(resumed), weights(whole))
    assert bool(weights(whole)["value_head.weight"].any())


@pytest.mark.parametrize(
    "wrong",
    [
        {"critic": "shard"},
        {"critic_lr": 0.0},
        {"value_coef": -1.0},
        {"clip_value": 0.0},
        {"gamma": 1.5},
        {"lam": -0.1},
        {"critic": "own", "lora": {}},
        {"scale_rewards": False},
    ],
    ids=str,
)
def test_arguments_out_of_range_are_named(wrong: dict[str, Any]) -> None:
    name, value = next(iter(wrong.items()))
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r}")):
        PPO("no/such/model", **wrong)
