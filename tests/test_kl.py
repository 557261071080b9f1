"""KL estimators: by hand, against exact distributions in float64, and the public case of their area."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightrl.kl import k1, k2, k3, reverse_kl

ALL = [k1, k2, k3, reverse_kl]
POLICY, REFERENCE = torch.tensor([0.5]).log(), torch.tensor([0.25]).log()


def test_b14_by_hand():
    # d = ln 2: d, d^2 / 2, 1/2 - 1 + ln 2
    for estimate, want in ((k1, 0.6931), (k2, 0.2402), (k3, 0.1931), (reverse_kl, 0.1931)):
        assert estimate(POLICY, REFERENCE).item() == pytest.approx(want, abs=1e-4)


@pytest.mark.parametrize("gap", [20.0, -20.0, 1e30, -1e30])
def test_b14_large_gaps_are_bounded(gap):
    policy = torch.zeros(1, requires_grad=True)
    for estimate, bound in ((k2, 50.0), (k3, 22015.5), (reverse_kl, 22015.5)):
        value = estimate(policy, torch.tensor([gap]))
        assert 0 <= value.item() <= bound
        (grad,) = torch.autograd.grad(value.sum(), policy)
        assert grad.isfinite().all()
    assert k1(policy, torch.tensor([gap])).isfinite()


@pytest.mark.parametrize("estimate", ALL)
@pytest.mark.parametrize("junk", [100.0, math.nan, math.inf])
def test_b14_masked_slot_adds_nothing(estimate, junk):
    policy = torch.tensor([-1.0, junk], requires_grad=True)
    value = estimate(policy, torch.tensor([-1.0, junk]), loss_mask=torch.tensor([True, False]))
    value.sum().backward()
    assert value.tolist() == [0.0, 0.0]
    assert policy.grad[1].item() == 0.0


@pytest.mark.parametrize("estimate", [k2, k3, reverse_kl])
def test_b14_one_step_lowers_the_kl(estimate):
    # A loss of kl_coef * KL alone, on 2 tokens weighted as the policy samples them.
    reference = torch.tensor([0.2, 0.8]).log()
    logits = torch.tensor([0.5, -0.5], requires_grad=True)

    def exact():
        logp = torch.log_softmax(logits, 0)
        return (logp.exp() * (logp - reference)).sum()

    before = exact().item()
    logp = torch.log_softmax(logits, 0)
    (logp.detach().exp() * estimate(logp, reference)).sum().mul(0.1).backward()
    with torch.no_grad():
        logits -= logits.grad
    assert exact().item() < before


@settings(max_examples=100, deadline=None)
@given(st.floats(-9, 0, width=32), st.floats(-9, 0, width=32))
def test_against_plain_python(policy, reference):
    d = policy - reference
    want = {k1: d, k2: d * d / 2, k3: math.expm1(-d) + d}
    for estimate, value in want.items():
        got = estimate(torch.tensor([policy]), torch.tensor([reference])).item()
        assert got == pytest.approx(value, rel=1e-5, abs=2e-7)
        assert got >= 0 or estimate is k1


@pytest.mark.parametrize("estimate", ALL)
def test_equal_is_exactly_zero_and_never_negative(estimate):
    values = -torch.rand(1000, generator=torch.Generator().manual_seed(0)) * 9
    assert not estimate(values, values.clone()).any()
    if estimate is not k1:
        assert (estimate(values, values + 1e-4 * torch.randn(1000)) >= 0).all()


def categorical(seed):
    random = torch.Generator().manual_seed(seed)
    logits, reference, old = torch.randn((3, 6), generator=random, dtype=torch.float64)
    return logits.requires_grad_(), torch.log_softmax(reference, 0), torch.log_softmax(old, 0)


@pytest.mark.parametrize("off_policy", [False, True])
def test_reverse_kl_has_the_value_and_the_gradient_of_the_reverse_kl(off_policy):
    logits, reference, old = categorical(0)
    logp = torch.log_softmax(logits, 0)
    exact = (logp.exp() * (logp - reference)).sum()
    (want,) = torch.autograd.grad(exact, logits, retain_graph=True)
    sampler = old if off_policy else logp.detach()
    estimated = (sampler.exp() * reverse_kl(logp, reference, old if off_policy else None)).sum()
    torch.testing.assert_close(estimated, exact)
    torch.testing.assert_close(torch.autograd.grad(estimated, logits, retain_graph=True)[0], want)
    if not off_policy:
        (by_k2,) = torch.autograd.grad((sampler.exp() * k2(logp, reference)).sum(), logits, retain_graph=True)
        torch.testing.assert_close(by_k2, want)
        (by_k1,) = torch.autograd.grad((sampler.exp() * k1(logp, reference)).sum(), logits)
        torch.testing.assert_close(by_k1, torch.zeros_like(by_k1))


def test_the_gradient_of_k3_is_the_forward_kls():
    logits, reference, _ = categorical(1)
    logp = torch.log_softmax(logits, 0)
    (want,) = torch.autograd.grad((reference.exp() * (reference - logp)).sum(), logits, retain_graph=True)
    (got,) = torch.autograd.grad((logp.detach().exp() * k3(logp, reference)).sum(), logits)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("estimate", ALL)
def test_shapes_and_dtypes(estimate):
    assert estimate(torch.zeros(2, 3).bfloat16(), torch.zeros(2, 3).bfloat16()).dtype == torch.float32
    with pytest.raises(ValueError, match="shapes differ"):
        estimate(torch.zeros(3), torch.zeros(3, 1))
    with pytest.raises(ValueError, match="shapes differ"):
        reverse_kl(torch.zeros(3), torch.zeros(3), torch.zeros(1))
