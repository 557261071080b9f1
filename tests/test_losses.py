"""Policy losses and their aggregation: by hand, against plain Python in float64, and the public cases of their area."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightrl import losses

RATIOS = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.0, 1.5])
ADVANTAGES = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, 0.0])
IDS = torch.tensor([0, 0, 0, 1, 1, 2])


def close(got, want, tol=1e-5):
    torch.testing.assert_close(got, torch.as_tensor(want, dtype=got.dtype), rtol=tol, atol=tol)


def gspo(logprobs, old, advantages, **kwargs):
    return losses.gspo_terms(logprobs, old, advantages, IDS[: len(logprobs)], **kwargs)


def reinforce(logprobs, old, advantages, **kwargs):
    return losses.reinforce_terms(logprobs, advantages, **kwargs)


TERMS = [losses.clipped_policy_terms, losses.cispo_terms, losses.sapo_terms, gspo, reinforce]


def test_worked_example_of_the_first_design():
    # old logprobs 0, advantage 0.5: -min(r A, clip(r) A) is -0.55, -0.6, -0.505; the mean -1.655 / 3.
    new = torch.tensor([1.1, 2.0, 1.01]).log().requires_grad_()
    loss = losses.clipped_policy_loss(new, torch.zeros(3), 0.5)
    close(loss, -1.655 / 3)
    loss.backward()
    # d(-r A)/d log r = -r A, over 3 tokens; nothing through the clipped one
    close(new.grad, [-0.55 / 3, 0.0, -0.505 / 3])
    # A = -0.5: 0.55, 1.0 (the larger loss is the active one), 0.505
    close(losses.clipped_policy_loss(new, torch.zeros(3), -0.5), 2.055 / 3)


def test_clipped_policy_loss_counts_the_completion_only():
    new = torch.tensor([[-50.0, math.nan, 0.0, math.log(1.1)]], requires_grad=True)
    loss = losses.clipped_policy_loss(new, torch.zeros(2), torch.tensor([1.0, -1.0]))
    close(loss, (-1.0 + 1.1) / 2)
    loss.backward()
    close(new.grad, [[0.0, 0.0, -0.5, 0.55]])


def test_clipped_policy_loss_of_an_empty_completion_is_zero():
    new = torch.tensor([-1.0, math.inf], requires_grad=True)
    loss = losses.clipped_policy_loss(new, torch.zeros(0), 1.0)
    loss.backward()
    assert loss.item() == 0.0
    assert new.grad.tolist() == [0.0, 0.0]


def test_clipped_policy_loss_refuses_bad_input():
    with pytest.raises(ValueError, match=r"\[2\] do not cover \[3\]"):
        losses.clipped_policy_loss(torch.zeros(2), torch.zeros(3), 1.0)
    with pytest.raises(ValueError, match="shapes differ: .*advantages"):
        losses.clipped_policy_loss(torch.zeros(4), torch.zeros(3), torch.zeros(4))
    with pytest.raises(ValueError, match="must not be negative"):
        losses.clipped_policy_loss(torch.zeros(3), torch.zeros(3), 1.0, clip=-0.1)


def test_b30_clip_fraction_counts_tokens_whose_clipped_branch_is_active():
    logprobs = RATIOS.log().requires_grad_()
    loss, metrics = losses.clipped_policy_terms(logprobs, torch.zeros(6), ADVANTAGES)
    close(loss, [-1.2, 1.5, -0.5, 0.8, -1.0, 0.0])
    assert metrics["clip_frac_high"].tolist() == [1, 0, 0, 0, 0, 0]
    assert metrics["clip_frac_low"].tolist() == [0, 0, 0, 1, 0, 0]
    assert metrics["clip_frac"].tolist() == [1, 0, 0, 1, 0, 0]
    close(metrics["ratio"], RATIOS)
    assert not any(m.requires_grad for m in metrics.values())
    loss.sum().backward()
    close(logprobs.grad, [0.0, 1.5, -0.5, 0.0, -1.0, 0.0])


def test_b30_asymmetric_range_and_masked_tokens():
    terms = losses.clipped_policy_terms
    one, zero = torch.ones(1), torch.zeros(1)
    assert terms((1.25 * one).log(), zero, one, clip_ratio_high=0.28)[1]["clip_frac"].item() == 0
    assert terms((1.29 * one).log(), zero, one, clip_ratio_high=0.28)[1]["clip_frac"].item() == 1
    mask = torch.tensor([False, True, True, True, True, True])
    metrics = terms(RATIOS.log(), torch.zeros(6), ADVANTAGES, loss_mask=mask)[1]
    assert metrics["clip_frac"].nansum() == 1
    assert metrics["clip_frac"].isnan().tolist() == (~mask).tolist()


@pytest.mark.parametrize("terms", TERMS)
def test_b30_nothing_is_clipped_on_policy(terms):
    logprobs = torch.randn(6, requires_grad=True)
    loss, metrics = terms(logprobs, logprobs.detach(), ADVANTAGES)
    assert all(metrics[name].sum() == 0 for name in metrics if name.startswith("clip_frac"))
    assert (metrics.get("ratio", torch.ones(1)) == 1).all()
    # On-policy every one of them has the policy gradient, -A d log pi.
    loss.sum().backward()
    close(logprobs.grad, -ADVANTAGES)


def test_dual_clip_bounds_negative_advantages():
    # A = -1, ratio 10: 10 without, 3 with; A = +1 is not touched.
    logprobs = torch.full((2,), 10.0).log().requires_grad_()
    loss, _ = losses.clipped_policy_terms(logprobs, torch.zeros(2), torch.tensor([-1.0, 1.0]), dual_clip=3.0)
    close(loss, [3.0, -1.2])
    loss.sum().backward()
    close(logprobs.grad, [0.0, 0.0])
    with pytest.raises(ValueError, match="dual_clip=1 must be above 1"):
        losses.clipped_policy_terms(logprobs, torch.zeros(2), torch.zeros(2), dual_clip=1)


def test_gspo_by_hand():
    # Sequence 0: log-ratios ln 1.2, ln 1.2, 0 and the last masked: mean ln 1.2, clipped at 1.1 for A = 1.
    # Sequence 1: log-ratio ln 0.9 within 1 - 0.2, A = 2: -1.8, gradient -1.8 each.
    logprobs = torch.tensor([1.2, 1.2, 7.0, 0.9, 0.9]).log().requires_grad_()
    mask = torch.tensor([True, True, False, True, True])
    loss, metrics = losses.gspo_terms(
        logprobs,
        torch.zeros(5),
        torch.tensor([1.0, 1.0, 1.0, 2.0, 2.0]),
        torch.tensor([0, 0, 0, 1, 1]),
        clip_ratio_low=0.2,
        clip_ratio_high=0.1,
        loss_mask=mask,
    )
    close(loss[mask], [-1.1, -1.1, -1.8, -1.8])
    assert metrics["clip_frac"][mask].tolist() == [1, 1, 0, 0]
    losses.aggregate(loss, mask, 2, mode="sequence", sequence_ids=torch.tensor([0, 0, 0, 1, 1])).backward()
    # d/d log pi_t of s A / 2 sequences = s A / (2 * 2 tokens)
    close(logprobs.grad, [0.0, 0.0, 0.0, -0.45, -0.45])


def test_cispo_by_hand():
    # ratio 8 cut to 5, weight constant: -5 * 1 * log 8; ratio 0.5 kept, A = -2: 0.5 * 2 * log 0.5
    logprobs = torch.tensor([8.0, 0.5]).log().requires_grad_()
    loss, metrics = losses.cispo_terms(logprobs, torch.zeros(2), torch.tensor([1.0, -2.0]))
    close(loss, [-5 * math.log(8), math.log(0.5)])
    assert metrics["clip_frac"].tolist() == [1, 0]
    loss.sum().backward()
    close(logprobs.grad, [-5.0, 1.0])


def test_sapo_by_hand():
    # r = 2, A = 1: 4 sigmoid(1) = 2.92423; A = -1: 4 / 1.05 sigmoid(1.05) = 2.82200
    loss, _ = losses.sapo_terms(torch.full((2,), math.log(2)), torch.zeros(2), torch.tensor([1.0, -1.0]))
    close(loss, [-2.92423, 2.82200])
    with pytest.raises(ValueError, match="must be > 0"):
        losses.sapo_terms(torch.zeros(1), torch.zeros(1), torch.zeros(1), tau_negative=0.0)


def test_reinforce_by_hand():
    # -2 * -0.5, -(-1) * -3
    close(losses.reinforce_terms(torch.tensor([-0.5, -3.0]), torch.tensor([2.0, -1.0]))[0], [1.0, -3.0])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-3, 0), st.floats(-3, 0), st.floats(-2, 2)), min_size=1, max_size=6),
    st.floats(0, 0.5),
    st.floats(0, 0.5),
)
def test_against_plain_python(tokens, low, high):
    new, old, advantages = torch.tensor(tokens, dtype=torch.float64).T
    ids = IDS[: len(tokens)].tolist()
    gaps = [p - q for p, q, _ in tokens]
    means = [sum(g for g, i in zip(gaps, ids, strict=True) if i == j) / ids.count(j) for j in ids]

    def clip(gap, a):
        r = math.exp(gap)
        return -min(r * a, max(1 - low, min(1 + high, r)) * a)

    def sapo(gap, a):
        tau = 1.0 if a > 0 else 1.05
        return -a * 4 / tau / (1 + math.exp(-tau * (math.exp(gap) - 1)))

    every = [a for *_, a in tokens]
    want = {
        losses.clipped_policy_terms: [clip(g, a) for g, a in zip(gaps, every, strict=True)],
        gspo: [clip(g, a) for g, a in zip(means, every, strict=True)],
        losses.cispo_terms: [-max(1 - low, min(1 + high, math.exp(p - q))) * a * p for p, q, a in tokens],
    }
    for terms, values in want.items():
        close(terms(new, old, advantages, clip_ratio_low=low, clip_ratio_high=high)[0], values)
        single = terms(new.float(), old.float(), advantages.float(), clip_ratio_low=low, clip_ratio_high=high)[0]
        close(single, values, tol=1e-4)
    close(losses.sapo_terms(new, old, advantages)[0], [sapo(g, a) for g, a in zip(gaps, every, strict=True)])


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_junk_in_a_masked_slot_reaches_nothing(terms, junk):
    mask = torch.tensor([True, False, True, False])
    hole = torch.where(mask, 0.0, junk)
    new, old = torch.tensor([-1.0, -2.0, -0.5, -1.0]), torch.tensor([-1.1, -2.0, -0.7, -1.0])
    clean = new.clone().requires_grad_()
    dirty = (new + hole).requires_grad_()
    results = [
        losses.aggregate(terms(p, old + h, torch.ones(4) + h, loss_mask=mask)[0] + h, mask, 2)
        for p, h in ((clean, torch.zeros(4)), (dirty, hole))
    ]
    assert results[0] == results[1]
    for result in results:
        result.backward()
    assert torch.equal(clean.grad, dirty.grad)
    assert dirty.grad[~mask].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("terms", TERMS)
def test_nan_in_a_live_slot_stays_visible(terms):
    assert terms(torch.tensor([math.nan, 0.0, 0.0, 0.0]), torch.zeros(4), torch.ones(4))[0][0].isnan()


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("gap", [500.0, -500.0])
def test_a_huge_log_ratio_stays_finite(terms, gap):
    logprobs = torch.full((2,), gap, requires_grad=True)
    loss, _ = terms(logprobs, torch.zeros(2), torch.tensor([1.0, -1.0]))
    loss.sum().backward()
    assert loss.isfinite().all()
    assert logprobs.grad.isfinite().all()


@pytest.mark.parametrize("terms", TERMS)
def test_half_precision_in_float32_out(terms):
    half = torch.zeros(4, dtype=torch.bfloat16)
    assert terms(half, half, half)[0].dtype == torch.float32


@pytest.mark.parametrize("terms", TERMS)
def test_wrong_shapes_and_ranges_are_errors(terms):
    with pytest.raises(ValueError, match=r"shapes differ: .*advantages \[4, 1\]"):
        terms(torch.zeros(4), torch.zeros(4), torch.zeros(4, 1))
    if terms in (losses.clipped_policy_terms, losses.cispo_terms, gspo):
        for name in ("clip_ratio_low", "clip_ratio_high"):
            with pytest.raises(ValueError, match="must not be negative"):
                terms(torch.zeros(4), torch.zeros(4), torch.zeros(4), **{name: -0.1})


def test_aggregate_by_hand():
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 100.0])
    mask = torch.tensor([True, True, True, True, False])
    ids = torch.tensor([0, 0, 0, 1, 1])
    # 10 / 4 tokens; (mean 2 + mean 4) / 2 sequences; 10 / (2 sequences x 8 tokens)
    close(losses.aggregate(values, mask, 4), 2.5)
    close(losses.aggregate(values, mask, 2, mode="sequence", sequence_ids=ids), 3.0)
    close(losses.aggregate(values, mask, 16, mode="constant"), 0.625)
    close(losses.aggregate(values.view(1, 5), mask.view(1, 5), torch.tensor(4)), 2.5)
    assert losses.aggregate(values, mask, 0).isinf()  # a caller's bug, not hidden


@pytest.mark.parametrize("mode", losses.MODES)
def test_aggregate_does_not_depend_on_the_cut(mode):
    values = torch.randn(6, dtype=torch.float64)
    mask = torch.tensor([True, False, True, True, True, False])
    whole = losses.aggregate(values, mask, 5, mode=mode, sequence_ids=IDS)
    parts = [(slice(0, 3), IDS[:3]), (slice(3, 6), IDS[3:] - 1)]
    shares = [losses.aggregate(values[p], mask[p], 5, mode=mode, sequence_ids=i) for p, i in parts]
    torch.testing.assert_close(sum(shares), whole)


def test_b07_one_mask_above_and_below_the_line():
    # lengths 2 (ended) and 8 (truncated), loss 1 everywhere: 2 / 2, not 2 / 10
    mask = torch.tensor([True] * 2 + [False] * 8)
    ids = torch.tensor([0] * 2 + [1] * 8)
    assert losses.aggregate(torch.ones(10), mask, mask.sum()).item() == 1.0
    assert losses.aggregate(torch.ones(10), mask, 1, mode="sequence", sequence_ids=ids).item() == 1.0


@pytest.mark.parametrize("mode", losses.MODES)
@pytest.mark.parametrize("denominator", [0, 10, torch.tensor(0)])
def test_b07_nothing_live_is_zero_with_zero_gradient(mode, denominator):
    weight = torch.nn.Parameter(torch.ones(6))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    mask = torch.zeros(6, dtype=torch.bool)
    terms, _ = losses.clipped_policy_terms(weight * 2, torch.zeros(6), ADVANTAGES, loss_mask=mask)
    loss = losses.aggregate(terms, mask, denominator, mode=mode, sequence_ids=IDS)
    loss.backward()
    optimizer.step()
    assert loss.item() == 0.0
    assert weight.grad.tolist() == [0.0] * 6
    assert weight.tolist() == [1.0] * 6


def test_aggregate_of_no_tokens_at_all():
    empty = torch.zeros(0)
    assert losses.aggregate(empty, empty.bool(), 3, mode="sequence", sequence_ids=empty.long()).item() == 0.0


def test_aggregate_refuses_bad_input():
    values, mask = torch.ones(2), torch.ones(2, dtype=torch.bool)
    with pytest.raises(ValueError, match="mode='mean' is not an aggregation; choose one of token, sequence, constant"):
        losses.aggregate(values, mask, 2, mode="mean")
    with pytest.raises(ValueError, match="needs sequence_ids"):
        losses.aggregate(values, mask, 2, mode="sequence")
    with pytest.raises(ValueError, match="shapes differ"):
        losses.aggregate(values, mask[:1], 2)
