"""Rewards that need no other package."""

from __future__ import annotations

import math
import re
from collections import deque
from typing import Any

from lightrl.rewards.extract import boxed_answer, hash_answer

_NUMBER = re.compile(
    r"(?:(?<![\w.)])[-+\u2212])?"  # a sign, unless it subtracts
    r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+)"
    r"(?:[eE][-+]?\d{1,3}(?!\d))?"
    r"(?:\s*/\s*\d+(?![\d.]))?"
)
_GAP = re.compile(r"(?<=\d)\s+(?=\d)(?!\d{3}(?![\d/]))")  # but 1 000 is 1000
_LONGEST_NUMBER = 300  # digits: beyond that a float is infinite
_RELATIVE_TOLERANCE = 1e-6


def exact_match(completion: str, ground_truth: Any) -> float:
    """1.0 where the completion is the ground truth, outer whitespace aside; an empty completion matches nothing."""
    answer = completion.strip()
    return float(bool(answer) and answer == _text(ground_truth).strip())


def numeric_match(completion: str, ground_truth: Any) -> float:
    """1.0 where the last number in the completion equals the last number in the ground truth.

    Reads thousands separators, decimals, exponents, the Unicode minus and simple fractions (``1/2``). Two whole numbers
    are compared exactly, others within 1e-6 of their size. Currency and percent signs are passed over.

    Raises:
        ValueError: If the ground truth holds no number.
    """
    gold = last_number(_text(ground_truth))
    if gold is None:
        raise ValueError(f"ground_truth={ground_truth!r} holds no number. Use exact_match, or correct the row.")
    answer = last_number(completion)
    return float(answer is not None and _equal(answer, gold))


def boxed_match(completion: str, ground_truth: Any) -> float:
    r"""1.0 where the last ``\boxed{}`` or ``\fbox{}`` holds the ground truth, as text or as a number."""
    return _matches(boxed_answer(completion), _text(ground_truth))


def _matches(answer: str | None, gold: str) -> float:
    if answer is None:
        return 0.0
    if _squeezed(answer) == _squeezed(gold):
        return 1.0
    numbers = whole_number(answer), whole_number(gold)
    return float(numbers[0] is not None and numbers[1] is not None and _equal(numbers[0], numbers[1]))


def _squeezed(text: str) -> str:
    """Return a text without whitespace, but where it parts two numbers: ``1 1/2`` is not ``11/2``."""
    return "".join(_GAP.sub("_", text).split())


def hash_match(completion: str, ground_truth: Any) -> float:
    """1.0 where what follows the last ``####``, as in GSM8K, is the ground truth, as text or as a number."""
    return _matches(hash_answer(completion), _text(ground_truth))


def last_number(text: str) -> float | int | None:
    """Return the last number in a text, an int where it is written as one, or None.

    Example:
        >>> last_number("it costs $1,234.50 in all."), last_number("3 - 5 = -2"), last_number("none")
        (1234.5, -2, None)
    """
    last = deque(_NUMBER.finditer(text), maxlen=1)
    return _parse(last[0].group()) if last else None


def whole_number(text: str) -> float | int | None:
    """Return the number that a text is as a whole, or None."""
    return _parse(text.strip()) if _NUMBER.fullmatch(text.strip()) else None


def _parse(token: str) -> float | int | None:
    token = token.replace(",", "").replace("\u2212", "-")
    if len(token) > _LONGEST_NUMBER:
        return None
    over, _, under = token.partition("/")
    value: float | int = int(over) if over.strip().lstrip("+-").isdigit() else float(over)
    if under:
        value = value / int(under) if int(under) else math.nan
    return value if math.isfinite(value) else None


def _equal(a: float | int, b: float | int) -> bool:
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return math.isclose(a, b, rel_tol=_RELATIVE_TOLERANCE)


def _text(ground_truth: Any) -> str:
    if ground_truth is None:
        raise ValueError(
            "ground_truth is None: the row has none. Add a column ground_truth, answer or reward_model to the data."
        )
    return str(ground_truth)
