"""Advantages: by hand, against plain Python in float64, and the public cases of their area."""

import itertools
import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightrl import advantages as adv

GROUPED = [
    adv.group_mean,
    adv.group_zscore,
    adv.leave_one_out,
    lambda r, g: adv.leave_one_out(r, g, scale=True),
    adv.reinforce_plus_plus_baseline,
    lambda r, g: adv.opo(r, g, [3] * len(r)),
    lambda r, g: adv.pass_at_k(r, g, 1),
]
ALL = [*GROUPED, adv.reinforce_plus_plus]


def close(got, want):
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float32), rtol=1e-5, atol=1e-5)


def test_worked_example_of_the_first_design():
    # mean of 1, 0, 1, 0 is 0.5
    close(adv.compute_advantages([1.0, 0.0, 1.0, 0.0], group_size=4), [0.5, -0.5, 0.5, -0.5])


def test_compute_advantages_keeps_the_shape_and_scales():
    # group 1, 0: mean 0.5, unbiased std sqrt(0.5) -> +-0.70711; group 2, 2: 0
    got = adv.compute_advantages(torch.tensor([[1.0, 0.0], [2.0, 2.0]]), group_size=2, scale=True)
    close(got, [[0.70711, -0.70711], [0.0, 0.0]])
    assert adv.compute_advantages([], group_size=4).shape == (0,)


@pytest.mark.parametrize(("rewards", "size"), [([1.0, 0.0, 1.0], 2), ([1.0], 0), ([[1.0, 0.0, 1.0]], 2)])
def test_compute_advantages_refuses_what_does_not_divide(rewards, size):
    with pytest.raises(ValueError, match="does not divide"):
        adv.compute_advantages(torch.tensor(rewards), group_size=size)


def test_by_hand():
    rewards, groups = [1.0, 0.0, 0.0, 0.0], [7, 7, 7, 7]
    # mean 1/4, sum of squares 12/16, unbiased std sqrt(1/4) = 0.5
    close(adv.group_zscore(rewards, groups), [1.5, -0.5, -0.5, -0.5])
    # others of the first: mean 0; of the rest: 1/3
    close(adv.leave_one_out(rewards, groups), [1.0, -1 / 3, -1 / 3, -1 / 3])
    # lengths 1, 1, 2, 4: baseline 1 / 8
    close(adv.opo(rewards, groups, [1, 1, 2, 4]), [0.875, -0.125, -0.125, -0.125])
    # k = 2: R = 1 - C(3,2)/C(4,2) = 1/2, std 1/2; right: (1 - 1/2)/(1/2) = 1;
    # wrong: 1 - C(2,1)/C(3,1) = 1/3, (1/3 - 1/2)/(1/2) = -1/3
    close(adv.pass_at_k(rewards, groups, 2), [1.0, -1 / 3, -1 / 3, -1 / 3])
    # batch 1, 0, 3, 0: mean 1, unbiased std sqrt((0 + 1 + 4 + 1) / 3) = sqrt(2)
    close(adv.reinforce_plus_plus([1.0, 0.0, 3.0, 0.0], [0, 0, 1, 1]), [0.0, -1 / 2**0.5, 2**0.5, -1 / 2**0.5])
    # centred 0.5, -0.5, 1.5, -1.5: std sqrt((0.25 + 0.25 + 2.25 + 2.25) / 3) = sqrt(5 / 3)
    got = adv.reinforce_plus_plus_baseline([1.0, 0.0, 3.0, 0.0], [0, 0, 1, 1])
    close(got, [x / (5 / 3) ** 0.5 for x in (0.5, -0.5, 1.5, -1.5)])


def test_b01_a_rollout_that_nobody_scored_moves_no_sibling():
    # siblings 1, 1, 0: mean 2/3
    close(adv.group_mean([1.0, 1.0, None, 0.0], [0] * 4), [1 / 3, 1 / 3, 0.0, -2 / 3])
    for estimate in ALL:
        scored = estimate([1.0, 1.0, 0.0], [0] * 3)
        got = estimate([1.0, 1.0, math.nan, 0.0], [0] * 4)
        torch.testing.assert_close(got[[0, 1, 3]], scored)
        assert got[2] == 0.0


@pytest.mark.parametrize("estimate", ALL)
def test_b02_constant_group_is_exactly_zero(estimate):
    for size, value in itertools.product(range(2, 17), (0.1, 0.3, 0.7, 0.95)):
        rewards = torch.full((size,), value)
        assert estimate(rewards, [0] * size).tolist() == [0.0] * size
        assert adv.zero_spread(rewards, [0] * size).all()


def test_b02_rounding_is_no_spread():
    assert adv.group_zscore([0.1 + 0.2, 0.3], [0, 0]).tolist() == [0.0, 0.0]
    close(adv.group_zscore([1.0, 1.00001], [0, 0]), [-(0.5**0.5), 0.5**0.5])


def test_b02_leave_one_out_with_scaling_stays_of_ordinary_size():
    # [1, -1/3, -1/3, -1/3] over the group's std 0.5
    close(adv.leave_one_out([1.0, 0.0, 0.0, 0.0], [0] * 4, scale=True), [2.0, -2 / 3, -2 / 3, -2 / 3])
    got = adv.leave_one_out(torch.tensor([0.0] + [0.95] * 7), [0] * 8, scale=True)
    assert got.isfinite().all()
    assert got.abs().max() <= 8**0.5 + 1e-5


def test_b03_groups_of_unequal_size_in_any_order():
    groups = torch.tensor([0] * 4 + [1] * 3 + [2] * 4)
    rewards = torch.tensor([0.0, 0, 1, 1, 5, 5, 5, 0, 1, 0, 1])
    want = [-0.5, -0.5, 0.5, 0.5, 0, 0, 0, -0.5, 0.5, -0.5, 0.5]
    close(adv.group_mean(rewards, groups), want)
    # sum of squares 1, unbiased std sqrt(1/3): 0.5 sqrt(3) = 0.866
    close(adv.group_zscore(rewards, groups), [x * 3**0.5 for x in want])
    order = torch.randperm(11, generator=torch.Generator().manual_seed(0))
    for estimate in ALL:
        torch.testing.assert_close(estimate(rewards[order], groups[order]), estimate(rewards, groups)[order])


@pytest.mark.parametrize("estimate", GROUPED)
def test_b05_group_of_one_is_zero(estimate):
    assert estimate([0.7], [0]).tolist() == [0.0]
    assert estimate([1.0, 0.0, 0.7], [0, 0, 1])[2] == 0.0
    assert estimate([1.0, 0.0, 0.7, None], [0, 0, 1, 1])[2] == 0.0
    close(adv.group_mean([1.0, 0.0, 0.7], [0, 0, 1]), [0.5, -0.5, 0.0])


@pytest.mark.parametrize("estimate", ALL)
def test_nothing_scored_and_nothing_at_all(estimate):
    assert estimate([None, None], [0, 0]).tolist() == [0.0, 0.0]
    assert adv.group_mean([], []).shape == (0,)


@pytest.mark.parametrize("estimate", ALL)
def test_bad_input_is_an_error(estimate):
    with pytest.raises(ValueError, match="reward 1 is infinite"):
        estimate([1.0, math.inf], [0, 0])
    with pytest.raises(ValueError, match="must both be"):
        estimate([1.0, 0.0], [0, 0, 1])


def test_bad_lengths_and_k_are_errors():
    with pytest.raises(ValueError, match="as many lengths"):
        adv.opo([1.0, 0.0], [0, 0], [1])
    with pytest.raises(ValueError, match="lengths must be at least 1, got 0"):
        adv.opo([1.0, 0.0], [0, 0], [0, 4])
    for k in (0, 3):
        with pytest.raises(ValueError, match=f"k={k} must be between 1"):
            adv.pass_at_k([1.0, 0.0], [0, 0], k)


def test_dr_grpo_is_the_group_mean():
    assert adv.dr_grpo is adv.group_mean


batches = st.integers(1, 12).flatmap(
    lambda n: st.tuples(
        st.lists(st.one_of(st.none(), st.sampled_from([0.0, 1.0]), st.floats(-3, 3)), min_size=n, max_size=n),
        st.lists(st.integers(0, 3), min_size=n, max_size=n),
        st.lists(st.integers(1, 50), min_size=n, max_size=n),
    )
)


def by_group(rewards, groups, formula):
    """The formula on each group with spread, in plain Python."""
    result = [0.0] * len(rewards)
    for group in set(groups):
        members = [i for i, g in enumerate(groups) if g == group and rewards[i] is not None]
        scored = [rewards[i] for i in members]
        if len(scored) > 1 and max(scored) - min(scored) > 1e-6 * max(1e-6, *map(abs, scored)):
            for i, value in zip(members, formula(scored, members), strict=True):
                result[i] = value
    return result


@settings(max_examples=60, deadline=None)
@given(batches)
def test_group_estimators_against_plain_python(batch):
    rewards, groups, lengths = batch

    def loo(r, _):
        return [x - (sum(r) - x) / (len(r) - 1) for x in r]

    def opo(r, members):
        weights = [lengths[i] for i in members]
        base = sum(w * x for w, x in zip(weights, r, strict=True)) / sum(weights)
        return [x - base for x in r]

    close(adv.group_mean(rewards, groups), by_group(rewards, groups, lambda r, _: [x - statistics.fmean(r) for x in r]))
    close(
        adv.group_zscore(rewards, groups),
        by_group(rewards, groups, lambda r, _: [(x - statistics.fmean(r)) / statistics.stdev(r) for x in r]),
    )
    close(adv.leave_one_out(rewards, groups), by_group(rewards, groups, loo))
    close(adv.opo(rewards, groups, lengths), by_group(rewards, groups, opo))
    one = [0] * len(rewards)
    close(
        adv.reinforce_plus_plus(rewards, groups),
        by_group(rewards, one, lambda r, _: [(x - statistics.fmean(r)) / statistics.stdev(r) for x in r]),
    )


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.one_of(st.sampled_from([0.0, 1.0]), st.integers(-3, 3).map(float)), min_size=2, max_size=7), st.data()
)
def test_pass_at_k_against_all_subsets(rewards, data):
    k = data.draw(st.integers(1, len(rewards)))
    best = [(max(rewards[i] for i in s), s) for s in itertools.combinations(range(len(rewards)), k)]
    values = [b for b, _ in best]
    want = [0.0] * len(rewards)
    if max(values) > min(values):
        mean, std = statistics.fmean(values), statistics.pstdev(values)
        want = [(statistics.fmean(b for b, s in best if i in s) - mean) / std for i in range(len(rewards))]
    close(adv.pass_at_k(rewards, [0] * len(rewards), k), want)


def test_pass_at_k_of_a_group_that_shrank_below_k():
    assert adv.pass_at_k([1.0, 0.0, None, 1.0, 0.0, 0.0], [0, 0, 0, 1, 1, 1], 3)[:3].tolist() == [0.0] * 3


def test_gae_by_hand():
    # gamma 1, lam 0.5. Sequence 0: delta_1 = 1 - 0.4 = 0.6, delta_0 = 0 + 0.4 - 0.2 = 0.2, A_0 = 0.2 + 0.5 * 0.6 = 0.5.
    # Sequence 1: delta = -1 - 0.5 = -1.5.
    got, returns = adv.gae(
        torch.tensor([0.0, 1.0, -1.0]), torch.tensor([0.2, 0.4, 0.5]), torch.tensor([0, 0, 1]), lam=0.5
    )
    close(got, [0.5, 0.6, -1.5])
    close(returns, [0.7, 1.0, -1.0])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.floats(0, 1), st.floats(0, 1), st.integers(0, 99))
def test_gae_against_a_loop(lengths, gamma, lam, seed):
    random = torch.Generator().manual_seed(seed)
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    rewards, values = torch.randn((2, len(ids)), generator=random)
    mask = torch.rand(len(ids), generator=random) < 0.7
    want = [0.0] * len(ids)
    for sequence in range(len(lengths)):
        ahead_value = ahead = 0.0
        for t in reversed([i for i in range(len(ids)) if ids[i] == sequence and mask[i]]):
            ahead = rewards[t].item() + gamma * ahead_value - values[t].item() + gamma * lam * ahead
            ahead_value = values[t].item()
            want[t] = ahead
    junk = torch.where(mask, 0.0, math.nan)
    got, returns = adv.gae(rewards + junk, values + junk, ids, gamma=gamma, lam=lam, loss_mask=mask)
    close(got, want)
    torch.testing.assert_close(returns, torch.where(mask, got + values, 0.0))


def test_gae_refuses_bad_input():
    one = torch.zeros(1)
    with pytest.raises(ValueError, match="between 0 and 1"):
        adv.gae(one, one, one.long(), gamma=1.1)
    with pytest.raises(ValueError, match=r"must be \[N\]"):
        adv.gae(one, torch.zeros(2), one.long())
