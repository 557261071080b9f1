"""The answers that the built-in rewards find, and which of them count."""

import time

import pytest

from lightrl.rewards import boxed_answer, boxed_match, exact_match, hash_answer, hash_match, numeric_match
from lightrl.rewards.builtin import last_number


@pytest.mark.parametrize(
    ("text", "gold", "reward"),
    [
        (r"so \boxed{840}. And so **Final Answer** \boxed{840}", 840, 1.0),
        (r"\boxed{004} and again \boxed{004}", "4", 1.0),
        (r"\boxed{3} no wait \boxed{5}", "5", 1.0),
        (r"\boxed{3} no wait \boxed{5}", "3", 0.0),
        (r"\boxed{3} but then \boxed{", "3", 0.0),
        (r"\boxed{3} but then \boxed{}", "3", 0.0),
        (r"\boxed{}", "", 0.0),
        (r"\boxed{ }", " ", 0.0),
        ("", "", 0.0),
        ("73", "73", 0.0),
    ],
)
def test_b25_the_last_box_is_the_answer(text: str, gold: object, reward: float) -> None:
    assert boxed_match(text, gold) == reward


def test_b25_unboxed_answers_and_empty_ones() -> None:
    assert numeric_match("Final Answer: **73**", "73") == 1.0
    assert exact_match("", "") == 0.0
    assert numeric_match("", "73") == 0.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\fbox{42}", "42"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed {7}", "7"),
        (r"\boxed 7", "7"),
        (r"is $\boxed 7$.", "7"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed{x^{2^{3}}}", "x^{2^{3}}"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{\fbox{3} + 1}", r"\fbox{3} + 1"),
        (r"\boxed{\boxed{3}", None),
        ("\\boxed{a\n b}", "a\n b"),
        ("\\boxed{\u00bd}", "\u00bd"),
        ("\\boxed{\u22123}", "\u22123"),
        (r"\boxedtext{3}", None),
        (r"\boxed", None),
        ("", None),
    ],
)
def test_b28_boxes_balance(text: str, answer: str | None) -> None:
    assert boxed_answer(text) == answer


def test_b28_answers_that_look_alike() -> None:
    assert boxed_match(r"\boxed{\frac{1}{2}}", r"\frac{1}{3}") == 0.0
    assert boxed_match(r"\boxed{ \frac{1} {2} }", r"\frac{1}{2}") == 1.0
    assert boxed_match("\\boxed{\u22123}", "-3") == 1.0
    assert boxed_match("\\boxed{\u00bd}", "1/2") == 0.0, "documented: no numbers but in digits"
    assert boxed_match(r"\boxed{1,000}", 1000) == 1.0
    assert boxed_match(r"\boxed{x = 4}", "4") == 0.0


@pytest.mark.parametrize(
    "text", [r"\boxed{", r"\boxed{{}", r"\boxed{1}", r"\boxed ", "1", "1,000,", "1/", "-1.5e3 ", " "]
)
def test_b28_long_answers_take_no_time(text: str) -> None:
    long = text * (100_000 // len(text))
    start = time.monotonic()
    for again in (long, r"\boxed{" + long + "}", r"\boxed{" * 10_000 + "}" * 10_000):
        boxed_match(again, "1")
        numeric_match(again, "1")
        hash_answer(again)
    assert time.monotonic() - start < 3.0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("it costs $1,234.50.", 1234.5),
        ("x = -5", -5),
        ("5-3", 3),
        ("about +7", 7),
        ("\u221212", -12),
        ("1,2,3", 3),
        ("1,000,000", 1_000_000),
        ("1/2", 0.5),
        ("3 / 0", None),
        ("50%", 50),
        (".5", 0.5),
        ("2.", 2),
        ("1.5e3", 1500.0),
        ("1e999", None),
        ("9" * 400, None),
        ("no", None),
    ],
)
def test_last_number(text: str, number: float | None) -> None:
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("text", "gold", "reward"),
    [
        ("the sum is 1,234", "#### 1234", 1.0),
        ("0.5", "1/2", 1.0),
        ("0.333333333", "1/3", 1.0),
        ("0.33", "1/3", 0.0),
        ("12345678901", 12345678902, 0.0),
        ("0", 0, 1.0),
        ("42 or 43", 42, 0.0),
        ("none", 42, 0.0),
    ],
)
def test_numeric_match(text: str, gold: object, reward: float) -> None:
    assert numeric_match(text, gold) == reward


def test_exact_match() -> None:
    assert exact_match(" 42\n", 42) == 1.0
    assert exact_match("42.0", "42") == 0.0


@pytest.mark.parametrize("reward", [exact_match, numeric_match])
def test_a_row_without_ground_truth_is_an_error(reward: object) -> None:
    with pytest.raises(ValueError, match="the row has none. Add a column"):
        reward("42", None)  # type: ignore[operator]


def test_a_ground_truth_without_number_is_an_error() -> None:
    with pytest.raises(ValueError, match="ground_truth='x' holds no number"):
        numeric_match("42", "x")


@pytest.mark.parametrize(
    ("text", "answer"),
    [("a #### 1\n#### 42 \nend", "42"), ("####7", "7"), ("#### \n7", None), ("#### 3\n####", None), ("42", None)],
)
def test_hash_answer(text: str, answer: str | None) -> None:
    assert hash_answer(text) == answer


@pytest.mark.parametrize(("text", "gold"), [("1e-13", "2e-13"), ("0", "1e-13"), (".0000000000001", "1e-12")])
def test_b26_tiny_numbers_are_not_all_equal(text: str, gold: str) -> None:
    assert numeric_match(text, gold) == 0.0
    assert boxed_match(f"\\boxed{{{text}}}", gold) == 0.0
    assert numeric_match("0.0", "0") == numeric_match("0.10e-12", "1e-13") == 1.0


@pytest.mark.parametrize(
    ("text", "gold", "reward"),
    [
        ("1 1/2", "11/2", 0.0),
        ("1 2", "12", 0.0),
        ("1 100/3", "1100/3", 0.0),
        ("1 000", "1000", 1.0),
        ("x + 1", "x+1", 1.0),
    ],
)
def test_b26_whitespace_that_parts_numbers_counts(text: str, gold: str, reward: float) -> None:
    assert boxed_match(f"\\boxed{{{text}}}", gold) == hash_match(f"#### {text}", gold) == reward
