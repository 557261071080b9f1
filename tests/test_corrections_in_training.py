"""Off-policy corrections and decoupled PPO as RLModule is configured for them."""

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightrl import RLModule
from lightrl.balance import Packer
from lightrl.corrections import GeometricMean, MaskedToken, TruncatedSequence, TruncatedToken, mismatch_metrics
from lightrl.datamodule import SizedLoader
from lightrl.packing import MicroBatch, StepBatch, pack
from tests.helpers.tiny import random_rollouts, tiny_model
from tests.helpers.training import Steps, quiet_trainer, tiny_data, tiny_module

pytestmark = pytest.mark.slow


def off_policy(seed: int = 0) -> list[Any]:
    """Rollouts whose sampler, old policy and current policy (``tiny_model``) all differ."""
    rollouts, g = random_rollouts(6, seed=seed, model=tiny_model()), torch.Generator().manual_seed(seed)
    for r in rollouts:
        r.rollout_logprobs = r.rollout_logprobs + 0.5 * torch.randn(len(r.completion_ids), generator=g)
    return rollouts


def surrogate(now: Tensor, old: Tensor, a: float) -> Tensor:
    ratio = (now - old).exp()
    return -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)


WEIGHTS: dict[str, tuple[Any, Callable[[Tensor], Tensor]]] = {
    "truncated token": (TruncatedToken(1.1), lambda gap: gap.exp().clamp(max=1.1)),
    "truncated sequence": (TruncatedSequence(1.1), lambda gap: gap.sum().exp().clamp(max=1.1).expand_as(gap)),
    "masked token": (MaskedToken(0.8, 1.3), lambda g: torch.where((g.exp() >= 0.8) & (g.exp() <= 1.3), g.exp(), 0.0)),
    "geometric mean": (
        GeometricMean(0.8, 1.2),
        lambda gap: torch.full_like(gap, float(0.8 <= gap.mean().exp() <= 1.2)),
    ),
    "decoupled PPO": (TruncatedToken(math.inf), lambda gap: gap.exp()),
    "any callable": (lambda batch, old: (torch.full_like(old, 0.5), {}), lambda gap: torch.full_like(gap, 0.5)),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_the_weights_multiply_the_terms_and_the_denominator_stays(name: str) -> None:
    """Three policies: ``-(pi_old / pi_rollout) min(r A, clip(r) A)`` with ``r = pi / pi_old``, over all tokens."""
    correction, weigh = WEIGHTS[name]
    rollouts = off_policy()
    total = sum(len(r.completion_ids) for r in rollouts)
    micro = pack(rollouts, temperature=1.0, denominator=float(total))
    now = [r.scored_logprobs + 0.1 * torch.arange(len(r.completion_ids)) for r in rollouts]
    loss, metrics = tiny_module(correction=correction).loss(micro, torch.cat(now))
    right = 0.0
    for r, x in zip(rollouts, now, strict=True):
        weights = weigh((r.scored_logprobs - r.rollout_logprobs).double())
        right += float((weights * surrogate(x, r.scored_logprobs, r.advantage)).sum())
    assert float(loss) == pytest.approx(right / total, rel=1e-5)
    plain = float(tiny_module().loss(micro, torch.cat(now))[0])
    assert abs(plain - right / total) > 1e-3
    if name in ("truncated token", "masked token", "geometric mean"):
        (share,) = [float(v.nanmean()) for k, v in metrics.items() if k.startswith("mismatch/")]
        assert 0 < share < 1


def test_decoupled_ppo_without_a_pass_interpolates_by_age() -> None:
    class AtStep3(RLModule):
        global_step = 3

    rollouts = off_policy()
    for i, r in enumerate(rollouts):
        r.scored_logprobs, r.policy_versions = None, torch.full((len(r.completion_ids),), i % 4)
    micro = pack(rollouts, temperature=1.0, denominator=1.0)
    # Unclipped, the two ratios multiply to pi / pi_rollout whatever pi_old is: far enough to clip at every age.
    now = [r.rollout_logprobs + 0.9 for r in rollouts]
    assert any(r.advantage > 0 for r in rollouts[:3])
    module = AtStep3(tiny_model(), correction=TruncatedToken(math.inf), recompute_old_logprobs=False)
    right = 0.0
    for i, (r, x) in enumerate(zip(rollouts, now, strict=True)):
        age = 3 - i % 4
        old = r.rollout_logprobs + 0.9 * ((age - 1) / age if age else 1.0)
        right += float(((old - r.rollout_logprobs).exp() * surrogate(x, old, r.advantage)).sum())
    assert float(module.loss(micro, torch.cat(now))[0]) == pytest.approx(right, rel=1e-4)


@pytest.mark.parametrize("cuts", [1, 3])
def test_mismatch_metrics_are_the_steps_whatever_the_cut(cuts: int) -> None:
    rollouts, logged = off_policy(), Steps()
    rollouts[0].rollout_logprobs[0] += 5.0  # the largest gap is a negative one
    loader = SizedLoader(
        1, lambda _: StepBatch([pack(p, temperature=1.0) for p in Packer().split(rollouts, cuts)], 0, rollouts)
    )
    trainer = quiet_trainer(strategy="auto", callbacks=[logged], max_steps=1)
    trainer.fit(tiny_module(correction=TruncatedToken(1.1)), loader)
    old, sampler = (torch.cat([getattr(r, n) for r in rollouts]) for n in ("scored_logprobs", "rollout_logprobs"))
    right = mismatch_metrics(old, sampler, cap=1.1)
    for name in ("logprob_diff_mean", "logprob_diff_max", "effective_sample_size", "truncated_frac"):
        assert logged.logged[0][f"mismatch/{name}"] == pytest.approx(float(right[name]), rel=1e-5), name
    assert 1 <= logged.logged[0]["mismatch/logprob_diff_p99"] / float(right["logprob_diff_p99"]) < 1.05
    assert logged.logged[0]["kl/mismatch"] == pytest.approx(float(right["mismatch_kl"]), rel=1e-5)


@pytest.mark.parametrize("recompute", [True, False])
def test_reused_rollouts_are_scored_only_if_asked_for(recompute: bool) -> None:
    logged = Steps()
    module = tiny_module(lr=1e-2, correction=TruncatedToken(math.inf), recompute_old_logprobs=recompute)
    quiet_trainer(max_steps=4, callbacks=[logged]).fit(module, tiny_data(epochs_per_rollout=2))
    assert all((r.scored_logprobs is not None) == recompute for s in logged.steps for r in s.rollouts)
    assert all(m["mismatch/truncated_frac"] == 0 for m in logged.logged)
    # At the second use the policy has moved: only the interpolation sees that between sampler and proximal policy.
    assert logged.logged[0]["mismatch/logprob_diff_max"] < 1e-4
    assert (logged.logged[1]["mismatch/logprob_diff_max"] < 1e-4) == recompute


def test_nothing_is_measured_without_a_correction() -> None:
    logged = Steps()
    quiet_trainer(max_steps=1, callbacks=[logged]).fit(tiny_module(), tiny_data())
    assert not [name for name in logged.logged[0] if name.startswith("mismatch/")]


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [(TruncatedToken, {"cap": 0.0}), (MaskedToken, {"low": 2.0, "high": 1.0}), (GeometricMean, {"low": -1.0})],
)
def test_thresholds_out_of_range_are_named_at_once(kind: Any, wrong: dict[str, float]) -> None:
    name, value = next(iter(wrong.items()))
    with pytest.raises(ValueError, match=re.escape(f"{name}={value}")):
        kind(**wrong)


def test_a_masked_token_with_garbage_has_weight_0() -> None:
    rollouts = off_policy()
    micro = pack(rollouts, temperature=1.0)
    micro.loss_mask[0], micro.rollout_logprobs[0] = False, float("nan")
    clean = dataclasses.replace(micro, rollout_logprobs=micro.rollout_logprobs.nan_to_num())
    for correction, _ in list(WEIGHTS.values())[:5]:
        module = tiny_module(correction=correction)
        assert loss_of(module, micro) == loss_of(module, clean)


def loss_of(module: RLModule, micro: MicroBatch) -> float:
    assert micro.old_logprobs is not None
    loss = float(module.loss(micro, micro.old_logprobs)[0])
    assert math.isfinite(loss)
    return loss
