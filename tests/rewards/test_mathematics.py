"""Mathematical equality in child processes, against math-verify's known faults."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from lightrl.rewards import MathMatch, RewardSum
from lightrl.types import Prompt


@pytest.fixture
def match() -> Iterator[MathMatch]:
    match = MathMatch(timeout=20.0)
    yield match
    match.close()


@pytest.mark.slow
def test_b26_answers_are_compared_part_by_part_and_by_size(match: MathMatch) -> None:
    different = [
        ("1/2^{99}", "1/2^{98}"),
        (r"\frac{1}{2004!}", r"\frac{1}{2006!}"),
        ("n=2,3,4", "n=1,2,3"),
        (r"\pm 2021", "2021"),
        ("12:00", "1:00"),
        ("1 1/2", "11/2"),
        ("12:00", "12"),
        ("1/2", "1/3"),
        ("1", "0,1"),
        ("01", "0,1"),
        (r"\{10^{-20}, 1\}", r"\{10^{-21}, 1\}"),
        (r"(10^{-20}, 2, 3)", r"(10^{-21}, 2, 3)"),
        ("1", "2"),
        ("x", "y"),
    ]
    same = [
        ("1/2", "0.5"),
        ("1234", "1,234"),
        ("115000", "115,000"),
        ("35", r"35\text{ cm}"),
        ("12:00", "12:00"),
        ("x+1", "1+x"),
        (r"\sqrt{8}", r"2\sqrt{2}"),
        (r"\{1,2\}", r"\{2,1\}"),
        ("1/2^{99}", "2^{-99}"),
        ("0.333333", r"\frac{1}{3}"),
        # Documented: either would do, but it must not change.
        (r"50\%", "0.5"),
        (r"50\%", "50"),
        ("(0,1)", "{0,1}"),
    ]
    for pairs, right in ((different, 0.0), (same, 1.0)):
        wrong = [(a, b) for a, b in pairs for x, y in ((a, b), (b, a)) if match(rf"\boxed{{{x}}}", y) != right]
        assert not wrong, f"should be {right}"


@pytest.mark.slow
def test_b25_b28_the_last_box_counts_here_too(match: MathMatch) -> None:
    assert match(r"... so \boxed{840}. ... **Final Answer** \boxed{840}", "840") == 1
    assert match(r"\boxed{3} but then \boxed{", "3") == 0
    assert match(r"\fbox{42}", "42") == 1
    assert match(r"\boxed{\frac{1}{2}}", r"\frac{1}{3}") == 0
    assert match("the answer is 42", 42) == 0
    assert match("", "42") == 0
    assert match(r"\boxed{}", "42") == 0
    assert match(r"\boxed{42}", r"so it is \boxed{42}") == 1
    unboxed = MathMatch(timeout=20.0, unboxed=True)
    assert unboxed("I think\n$\\frac{84}{2}$\n", 42) == 1
    unboxed.close()


@pytest.mark.slow
def test_b24_an_answer_without_end_is_wrong_and_counted_in_time() -> None:
    match = MathMatch(timeout=1.5)
    started = time.perf_counter()
    with pytest.warns(UserWarning, match="took too long: it counts as wrong"):
        assert match(r"\boxed{9^{9^{9^{9}}}}", "3") == 0.0
    assert time.perf_counter() - started < 30, "its start included"
    assert match.timeouts == 1
    assert match(r"\boxed{2+2}", "4") == 1.0, "a new child"
    match.close()


def test_a_row_without_answer_is_named() -> None:
    for gold in (None, "", "$$", r"\boxed{}"):
        with pytest.raises(ValueError, match="is no answer to compare with"):
            MathMatch()(r"\boxed{1}", gold)


def test_strange_and_endless_answers_need_no_process() -> None:
    match = MathMatch()
    for text in (r"\boxed{" + "1+" * 60_000 + "1}", "\u2028 \U0001f600", r"\boxed"):
        assert match(text, "1") == 0.0
    assert match._equal._idle == []


def test_without_math_verify_the_extra_is_named(monkeypatch: Any) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'lightrl-trainer\[math\]'"):
        MathMatch()(r"\boxed{1}", "1")


@pytest.mark.slow
def test_as_one_term_by_import_path() -> None:
    scorer = RewardSum({"math": "lightrl.rewards:math_match"}, workers=2)
    texts = [r"\boxed{0.5}", r"\boxed{1}"] * 4
    found = scorer.score(texts, [Prompt([1], ground_truth=r"\frac{1}{2}")] * 8)
    assert [s.total for s in found] == [1.0, 0.0] * 4
    scorer.close()
