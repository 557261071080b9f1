"""Micro-batches: a bound on what the model sees, groups together, work balanced."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightrl.balance import Packer
from lightrl.moves import even_out, plan_moves
from lightrl.packing import live_tokens
from lightrl.types import Prompt, Rollout, RolloutGroup


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


def worst(costs: list[list[float]], moves: dict[tuple[int, int], int]) -> float:
    """The most loaded rank's cost over the mean."""
    loads = [0.0] * len(costs)
    for r, theirs in enumerate(costs):
        for i, cost in enumerate(theirs):
            loads[moves.get((r, i), r)] += cost
    return max(loads) * len(loads) / sum(loads)


@pytest.mark.parametrize(("ranks", "each"), [(4, 4), (8, 4), (32, 4)])
def test_moving_groups_evens_out_ranks_whose_completions_are_lognormal(ranks: int, each: int) -> None:
    g, packer = torch.Generator().manual_seed(0), Packer()
    lengths = (800 * torch.randn(ranks, each, 8, generator=g).exp()).clamp(1, 8192).long().tolist()
    costs = [[sum(packer.cost(200 + n) for n in group) for group in theirs] for theirs in lengths]
    moves = plan_moves(costs)
    before, after = worst(costs, {}), worst(costs, moves)
    assert after < 1.15
    assert after - 1 < 0.5 * (before - 1)
    assert len(moves) < 0.25 * ranks * each
    assert all(to != origin[0] for origin, to in moves.items())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.floats(0, 1e9), max_size=6), min_size=1, max_size=5))
def test_moves_end_and_never_make_it_worse(costs: list[list[float]]) -> None:
    moves = plan_moves(costs)
    assert all(costs[r][i] > 0 for r, i in moves)
    if sum(map(sum, costs)):
        assert worst(costs, moves) <= worst(costs, {}) * (1 + 1e-9)


@pytest.mark.timeout(20)
def test_a_group_as_large_as_the_gap_does_not_go_back_and_forth() -> None:
    assert plan_moves([[0.2, 0.1, 0.2], []]) in ({(0, 0): 1}, {(0, 2): 1})  # in float64 0.3 - 0.2 is not 0.1
    assert len(plan_moves([[2.0, 1.0, 1.0, 0.2], []])) == 1
    assert plan_moves([[1e9, 5e-324, 5e-324], [1e9, 5e-324], [5e-324] * 3, []])


def test_a_rank_sends_what_it_gives_away_and_takes_what_it_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(ids: list[int]) -> list[RolloutGroup]:
        return [RolloutGroup(Prompt([i]), group(0, i, [1, 2])) for i in ids]

    everywhere = [made([3, 1, 2]), made([1, 1])]
    costs: Any = [[float(len(g.rollouts[0].prompt_ids)) for g in theirs] for theirs in everywhere]
    found = []
    for r in (0, 1):
        gathered = iter([costs, [{(0, 2): everywhere[0][2]}, {}]])
        monkeypatch.setattr("lightrl.moves.all_objects", lambda mine, told=gathered: next(told))
        monkeypatch.setattr("lightrl.moves.rank", lambda r=r: r)
        found.append(even_out(everywhere[r], lambda g: float(len(g.rollouts[0].prompt_ids))))
    assert [[len(g.rollouts[0].prompt_ids) for g in theirs] for theirs in found] == [[3, 1], [1, 1, 2]]
    assert [[g.rollouts[0].group_id for g in theirs] for theirs in found] == [[0, 1], [0, 1, 2]]


def test_the_load_of_groups_by_hand() -> None:
    rollouts = group(0, 4, [2, 3]) + group(1, 3, [1])
    # As in the test of the cost, and 4 + 16/48.
    shared = (6 + 36 / 48) + (7 + 49 / 48) - (4 + 16 / 48) + (4 + 16 / 48)
    assert Packer(share_prefix=True, hidden_size=4).load(rollouts) == pytest.approx(shared)
    assert Packer(hidden_size=4).load(rollouts) == pytest.approx(shared + (4 + 16 / 48))


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
