"""Mixtures and curricula: proportions, resumption, and what a curriculum is told."""

import copy
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightrl.prompts import CurriculumOrder, MixedOrder, weighted_sources
from lightrl.types import Prompt


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    weights=st.lists(st.floats(0.01, 100), min_size=4, max_size=4),
    takes=st.lists(st.integers(0, 7), max_size=8),
    shuffle=st.booleans(),
)
def test_each_source_has_its_share_at_any_time_and_all_its_rows_in_turn(
    sizes: list[int], weights: list[float], takes: list[int], shuffle: bool
) -> None:
    weights = weights[: len(sizes)]
    order = MixedOrder(sizes, weights, seed=1, shuffle=shuffle)
    rows = [row for n in takes for row in order.take(n)]
    ends = np.cumsum(sizes)
    sources = [int(np.searchsorted(ends, row, side="right")) for row in rows]
    for i, size in enumerate(sizes):
        visits = [row for row, source in zip(rows, sources, strict=True) if source == i]
        assert abs(len(visits) - len(rows) * weights[i] / sum(weights)) <= len(sizes)
        for start in range(0, len(visits) - size + 1, size):
            assert len(set(visits[start : start + size])) == size, "no row twice before each was visited once"


def test_a_mixture_goes_on_where_it_was() -> None:
    order = MixedOrder([5, 7], [1.0, 3.0], seed=2)
    order.take(9)
    state = copy.deepcopy(order.state_dict())
    wanted = order.take(20)
    again = MixedOrder([5, 7], [2.0, 6.0], seed=99)
    again.load_state_dict(state)
    assert again.take(20) == wanted
    with pytest.raises(ValueError, match=r"source weights \[0.25, 0.75\] and they are now \[0.5, 0.5\]"):
        MixedOrder([5, 7], [1.0, 1.0], seed=2).load_state_dict(state)


@pytest.mark.parametrize("weight", [0, -1.0, float("nan"), float("inf"), True, "1", None])
def test_a_weight_that_is_none_is_named(weight: Any) -> None:
    with pytest.raises(ValueError, match=r"the weight of 'b.jsonl' is .*: it must be a number above 0"):
        weighted_sources({"a.jsonl": 1, "b.jsonl": weight})


def test_what_is_one_source_and_what_are_several() -> None:
    rows = [{"prompt": "a"}]
    assert weighted_sources("a.jsonl") == [("a.jsonl", 1.0)]
    assert weighted_sources(rows) == [(rows, 1.0)]
    assert weighted_sources([("a.jsonl", 2), (rows, 0.5)]) == [("a.jsonl", 2), (rows, 0.5)]
    assert weighted_sources({"a.jsonl": 2}) == [("a.jsonl", 2)]


PROMPTS = [Prompt([1] * n) for n in (3, 1, 2)]


def hardest_first(prompts: Any, epoch: int, mean_rewards: Any, rng: Any) -> list[int]:
    """Leave out what is solved, and visit the rest from the lowest reward up."""
    left = [i for i in range(len(prompts)) if mean_rewards.get(i, 0.0) < 1.0]
    return sorted(left, key=lambda i: mean_rewards.get(i, 0.0))


def test_a_curriculum_sees_rewards_and_chooses() -> None:
    order = CurriculumOrder(PROMPTS, 0, hardest_first)
    assert order.take(3) == [0, 1, 2]
    order.note({0: 0.5, 1: 1.0, 2: 0.25})
    assert order.take(5) == [2, 0, 2, 0, 2]
    assert order.epoch == 3


def test_a_curriculum_goes_on_where_it_was() -> None:
    def random_rows(prompts: Any, epoch: int, mean_rewards: Any, rng: np.random.Generator) -> Any:
        return rng.integers(0, len(prompts), 5)

    order = CurriculumOrder(PROMPTS, 4, random_rows)
    order.take(3)
    order.note({0: 0.5})
    state = copy.deepcopy(order.state_dict())
    wanted = order.take(12)
    again = CurriculumOrder(PROMPTS, 9, random_rows)
    again.load_state_dict(state)
    assert again.take(12) == wanted
    assert again.mean_rewards == {0: 0.5}
    assert len(Counter(wanted)) > 1


@pytest.mark.parametrize(
    ("rows", "message"),
    [([], "gave no row for epoch 0"), ([0, 3], "gave the row 3, and there are 3"), ([-1], "row -1")],
)
def test_rows_that_are_not_there_are_named(rows: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CurriculumOrder(PROMPTS, 0, lambda *_: rows)
