"""Off-policy corrections: by hand and against plain Python in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightrl import corrections
from lightrl.losses import clipped_policy_terms

IDS = torch.tensor([0, 0, 1, 1, 1])
RATIOS = torch.tensor([1.0, 3.0, 0.5, 2.0, 1.5])
ZEROS = torch.zeros(5)


def sequence(old, rollout, **kwargs):
    return corrections.truncated_sequence_weights(old, rollout, IDS, **kwargs)


def geometric(old, rollout, **kwargs):
    return corrections.geometric_mean_weights(old, rollout, IDS, **kwargs)


ALL = [corrections.truncated_token_weights, sequence, corrections.masked_token_weights, geometric]


def close(got, want):
    torch.testing.assert_close(got, torch.as_tensor(want, dtype=got.dtype), rtol=1e-5, atol=1e-6)


def test_token_level_by_hand():
    weights, metrics = corrections.truncated_token_weights(RATIOS.log(), ZEROS, cap=2.0)
    close(weights, [1.0, 2.0, 0.5, 2.0, 1.5])
    close(metrics["ratio"], RATIOS)
    assert metrics["truncated_frac"].tolist()[:3] == [0, 1, 0]


def test_sequence_level_by_hand():
    # products 3 and 1.5
    weights, metrics = sequence(RATIOS.log(), ZEROS, cap=2.0)
    close(weights, [2.0, 2.0, 1.5, 1.5, 1.5])
    assert metrics["truncated_frac"].tolist() == [1, 1, 0, 0, 0]
    # without the second token: 1
    weights, _ = sequence(RATIOS.log(), ZEROS, loss_mask=torch.tensor([True, False, True, True, True]))
    close(weights, [1.0, 0.0, 1.5, 1.5, 1.5])


def test_masked_by_hand():
    weights, metrics = corrections.masked_token_weights(RATIOS.log(), ZEROS, low=0.6, high=2.5)
    close(weights, [1.0, 0.0, 0.0, 2.0, 1.5])
    assert metrics["rejected_frac"].tolist() == [0, 1, 1, 0, 0]


def test_geometric_mean_by_hand():
    # 3^(1/2) = 1.732, 1.5^(1/3) = 1.145
    weights, metrics = geometric(RATIOS.log(), ZEROS, low=0.8, high=1.2)
    assert weights.tolist() == [0, 0, 1, 1, 1]
    close(metrics["ratio"], [3 ** (1 / 2)] * 2 + [1.5 ** (1 / 3)] * 3)
    assert metrics["rejected_frac"].tolist() == [1, 1, 0, 0, 0]


def test_decoupled_ppo_by_hand():
    # pi / pi_old = 1.5, clipped at 1.2; pi_old / pi_rollout = 1.4: -1.4 * 1.2
    old = torch.tensor([1.4]).log()
    loss, _ = clipped_policy_terms(old + math.log(1.5), old, torch.ones(1))
    weights, _ = corrections.truncated_token_weights(old, torch.zeros(1), cap=math.inf)
    close(weights * loss, [-1.68])


def test_approximate_proximal_by_hand():
    # staleness 0: the current policy; 1: the sampler; 2: half way; 4: three quarters
    got = corrections.approximate_proximal(
        torch.full((4,), -1.0, requires_grad=True), torch.full((4,), -3.0), torch.tensor([0, 1, 2, 4])
    )
    close(got, [-1.0, -3.0, -2.0, -1.5])
    assert not got.requires_grad


def test_mismatch_metrics_by_hand():
    # ratios 2, 1/2: |d| = ln 2 twice; k3 of rollout against old: (2 - 1 - ln 2 + 1/2 - 1 + ln 2) / 2 = 1/4;
    # (2.5)^2 / (2 * 4.25) = 0.735294; the masked ratio is nowhere.
    got = corrections.mismatch_metrics(
        torch.tensor([2.0, 0.5, 99.0]).log(), torch.zeros(3), cap=1.5, loss_mask=torch.tensor([True, True, False])
    )
    want = dict.fromkeys(("logprob_diff_mean", "logprob_diff_p99", "logprob_diff_max"), math.log(2))
    want |= {"mismatch_kl": 0.25, "effective_sample_size": 0.735294, "truncated_frac": 0.5}
    assert {name: value.item() for name, value in got.items()} == pytest.approx(want, abs=1e-6)


def test_p99_is_the_nearest_rank():
    got = corrections.mismatch_metrics(torch.arange(1.0, 201.0) / 100, torch.zeros(200))
    close(got["logprob_diff_p99"], 1.98)  # the 198th of 200
    close(got["logprob_diff_max"], 2.0)


def test_mismatch_metrics_with_nothing_live_are_finite():
    got = corrections.mismatch_metrics(ZEROS, ZEROS, loss_mask=torch.zeros(5, dtype=torch.bool))
    assert got.pop("effective_sample_size").item() == 1.0
    assert all(value.item() == 0.0 for value in got.values())


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(-3, 0), st.floats(-3, 0), st.booleans()), min_size=5, max_size=5))
def test_against_plain_python(tokens):
    old, rollout = torch.tensor([t[:2] for t in tokens], dtype=torch.float64).T
    mask = torch.tensor([t[2] for t in tokens])
    gaps = [p - q if live else 0.0 for p, q, live in tokens]
    sums = [sum(gaps[j] for j in range(5) if IDS[j] == i) for i in IDS]
    counts = [sum(tokens[j][2] for j in range(5) if IDS[j] == i) for i in IDS]
    band = {"low": 0.7, "high": 1.4}
    want = {
        ALL[0]: [min(2.0, math.exp(g)) for g in gaps],
        ALL[1]: [min(2.0, math.exp(s)) for s in sums],
        ALL[2]: [math.exp(g) * (0.7 <= math.exp(g) <= 1.4) for g in gaps],
        ALL[3]: [float(0.7 <= math.exp(s / max(1, c)) <= 1.4) for s, c in zip(sums, counts, strict=True)],
    }
    for correct, values in want.items():
        got, _ = correct(old, rollout, loss_mask=mask, **(band if correct in ALL[2:] else {}))
        close(got, torch.where(mask, torch.tensor(values, dtype=torch.float64), 0.0))


@pytest.mark.parametrize("correct", ALL)
def test_weights_are_detached_finite_and_one_where_nothing_differs(correct):
    old = torch.randn(5, requires_grad=True)
    weights, metrics = correct(old, old.detach())
    assert weights.tolist() == [1.0] * 5
    assert not weights.requires_grad
    assert all(not m.requires_grad for m in metrics.values())
    assert correct(old + 1e4, old)[0].isfinite().all()


@pytest.mark.parametrize("correct", ALL)
def test_junk_in_a_masked_slot_reaches_nothing_and_in_a_live_slot_stays(correct):
    mask = torch.tensor([True, False, True, True, True])
    junk = torch.where(mask, 0.0, math.nan)
    weights, metrics = correct(ZEROS + junk, ZEROS, loss_mask=mask)
    assert weights.tolist() == [1.0, 0.0, 1.0, 1.0, 1.0]
    assert all(m.isnan().tolist() == (~mask).tolist() for m in metrics.values())
    assert correct(ZEROS + junk, ZEROS)[0][1].isnan()


@pytest.mark.parametrize("correct", ALL)
def test_bad_input_is_an_error(correct):
    with pytest.raises(ValueError, match="shapes differ"):
        correct(ZEROS, ZEROS[:, None])
    bad, message = (
        ({"cap": 0.0}, "cap=0.0 must be > 0") if correct in ALL[:2] else ({"low": 2.0, "high": 1.0}, "low=2.0")
    )
    with pytest.raises(ValueError, match=message):
        correct(ZEROS, ZEROS, **bad)
