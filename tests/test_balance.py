"""Micro-batches: a bound on what the model sees, groups together, work balanced."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightrl.balance import Packer
from lightrl.packing import live_tokens
from lightrl.types import Rollout


def group(group_id: int, prompt: int, completions: list[int]) -> list[Rollout]:
    """Completions of the given lengths after one prompt, differing from their first token on."""
    head = [group_id + 100] * prompt
    return [Rollout(head, [i] * n, torch.zeros(n), group_id=group_id) for i, n in enumerate(completions)]


def row(packer: Packer, part: list[Rollout]) -> int:
    return len(packer.pack(part, temperature=1.0).input_ids)


def test_a_group_counts_its_prompt_once_and_stays_together() -> None:
    rollouts = group(0, 10, [2, 3]) + group(1, 8, [4, 1])  # 15 and 13 tokens; 25 and 21 if not shared
    shared = Packer(share_prefix=True)
    assert [row(shared, p) for p in shared.plan(rollouts, 28)] == [28]
    parts = shared.plan(rollouts[::2] + rollouts[1::2], 27)
    assert sorted(sorted(r.group_id for r in p) for p in parts) == [[0, 0], [1, 1]]
    assert len(Packer().plan(rollouts, 28)) == 2


def test_a_group_is_cut_only_where_it_does_not_fit() -> None:
    rollouts = group(0, 10, [5, 5, 5, 5])
    packer = Packer(share_prefix=True)
    assert [row(packer, p) for p in packer.plan(rollouts, 30)] == [30]
    assert [row(packer, p) for p in packer.plan(rollouts, 29)] == [20, 20]
    assert [row(packer, p) for p in packer.plan(rollouts, 15)] == [15] * 4


def test_one_rollout_that_is_too_long_does_not_tear_its_group_apart() -> None:
    packer = Packer(share_prefix=True)
    parts = packer.plan(group(0, 4, [30, 2, 3, 2]), 12)
    assert sorted([row(packer, p) for p in parts]) == [11, 34]


def test_cost_by_hand() -> None:
    packer = Packer(share_prefix=True, hidden_size=4)
    assert packer.cost(12) == pytest.approx(12 + 144 / 48)
    (unit,) = packer._units(group(0, 4, [2, 3]), 100)
    # Prompt 4 + 16/48; first completion's two tokens bring it to 6 + 36/48, the other's three to 7 + 49/48.
    assert unit.cost == pytest.approx((6 + 36 / 48) + (7 + 49 / 48) - (4 + 16 / 48))
    assert unit.tokens == 9


def test_parts_are_balanced_by_cost_and_not_by_tokens() -> None:
    rollouts = [r for i, n in enumerate([999, 99, 99, 99, 99, 99, 99, 99, 99, 99, 99]) for r in group(i, 1, [n])]
    packer = Packer(hidden_size=32)  # 1000 tokens cost 1000 + 1e6 / 384 = 3604, ten times 100 cost 1260
    loads = sorted(sum(packer.cost(len(r.token_ids)) for r in p) for p in packer.split(rollouts, 3))
    assert loads == pytest.approx([630, 630, 3604], abs=1)
    flat = Packer(hidden_size=10**9)
    assert sorted(sum(len(r.token_ids) for r in p) for p in flat.split(rollouts, 3)) == [500, 500, 1000]


groups = st.lists(st.tuples(st.integers(1, 12), st.lists(st.integers(1, 8), min_size=1, max_size=5)), max_size=6)


@settings(max_examples=60, deadline=None)
@given(groups, st.integers(20, 60), st.integers(1, 9), st.booleans())
def test_the_budget_bounds_what_the_model_sees_and_nothing_is_lost(
    sizes: list[tuple[int, list[int]]], budget: int, bins: int, share: bool
) -> None:
    rollouts = [r for i, (prompt, completions) in enumerate(sizes) for r in group(i, prompt, completions)]
    packer = Packer(share, hidden_size=16)
    for parts in (packer.plan(rollouts, budget), packer.split(rollouts, bins)):
        assert sorted(id(r) for p in parts for r in p if live_tokens([r])) == sorted(map(id, rollouts))
    assert len(packer.split(rollouts, bins)) == bins
    assert all(0 < row(packer, p) <= budget for p in packer.plan(rollouts, budget))


@settings(max_examples=60, deadline=None)
@given(groups, st.integers(20, 60), st.integers(1, 9))
def test_the_budget_holds_with_as_many_parts_as_another_rank_has(
    sizes: list[tuple[int, list[int]]], budget: int, others: int
) -> None:
    rollouts = [r for i, (prompt, completions) in enumerate(sizes) for r in group(i, prompt, completions)]
    packer = Packer(True, hidden_size=16)
    alone = len(packer.plan(rollouts, budget))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightrl.balance.all_objects", lambda mine: [mine, others])
        parts = packer.plan(rollouts, budget)
    assert len(parts) == max(alone, others)
    assert all(row(packer, p) <= budget for p in parts)
    assert sum(len(p) for p in parts if live_tokens(p)) == len(rollouts)
