"""What is scored before the first update, and the frozen reference."""

import pytest
import torch

from lightrl import kl
from lightrl.packing import pack
from tests.helpers.tiny import batch_of, by_hand, random_rollouts, tiny_model
from tests.helpers.training import Steps, equal, quiet_trainer, tiny_data, tiny_module, weights


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
