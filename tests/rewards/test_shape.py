"""Rewards of form: hand-made values, and a pattern that backtracks."""

import time

import pytest

from lightrl.rewards import FormatMatch, LengthPenalty, RepetitionPenalty, RewardSum, hash_match
from lightrl.types import Prompt


def test_format() -> None:
    reward = FormatMatch(r"<think>.*</think>\s*<answer>.+</answer>")
    assert reward("<think>a\nb</think>\n<answer>4</answer>") == 1.0
    for text in ("", "4", "<think></think><answer></answer>", "x<think></think><answer>4</answer>"):
        assert reward(text) == 0.0
    with pytest.raises(ValueError, match=r"pattern='\(' is no regular expression"):
        FormatMatch("(")


def test_b24_a_pattern_that_backtracks_holds_up_nobody() -> None:
    slow = FormatMatch(r"(a|aa)+", timeout=0.5)
    scorer = RewardSum({"form": slow, "length": lambda c: len(c)}, on_error="exclude")
    started = time.perf_counter()
    with pytest.warns(UserWarning, match="'form' failed .*TimeoutError"):
        found = scorer.score(["a" * 60 + "d", "aa"], [Prompt([1])] * 2)
    assert time.perf_counter() - started < 5
    assert [s.terms["form"] for s in found] == [None, 1.0]
    assert [s.terms["length"] for s in found] == [61.0, 2.0]


def test_a_config_files_class_without_arguments_is_one_reward() -> None:
    assert [term.name for term in RewardSum({"class_path": "lightrl.rewards.RepetitionPenalty"}).terms] == [
        "RepetitionPenalty"
    ]


@pytest.mark.parametrize(("tokens", "reward"), [(0, 0.0), (4, 0.0), (5, -0.25), (7, -0.75), (8, -1.0), (99, -1.0)])
def test_length_penalty(tokens: int, reward: float) -> None:
    assert LengthPenalty(free=4, limit=8)("", completion_ids=[5] * tokens) == reward


@pytest.mark.parametrize(
    ("n", "ids", "reward"),
    [(1, [5, 6, 7], 0.0), (1, [5, 5, 5, 5], -0.75), (2, [5, 6, 5, 6], -1 / 3), (4, [5, 6], 0.0), (4, [], 0.0)],
)
def test_repetition_penalty(n: int, ids: list[int], reward: float) -> None:
    assert RepetitionPenalty(n)("", completion_ids=ids) == pytest.approx(reward)


def test_bad_arguments_are_named() -> None:
    for free, limit in ((-1, 4), (4, 4)):
        with pytest.raises(ValueError, match=f"free={free}, limit={limit}"):
            LengthPenalty(free, limit)
    with pytest.raises(ValueError, match="n=0"):
        RepetitionPenalty(0)


@pytest.mark.parametrize(
    ("text", "gold", "reward"),
    [
        ("6 * 7\n#### 42", "42", 1.0),
        ("#### 41\n#### 42.0 ", 42, 1.0),
        ("#### 1,000", "1000", 1.0),
        ("42", "42", 0.0),
        ("####", "", 0.0),
        ("#### ja", "ja", 1.0),
    ],
)
def test_hash_match(text: str, gold: object, reward: float) -> None:
    assert hash_match(text, gold) == reward
