"""Whether two mathematical answers are equal, by math-verify and against its known faults.

Runs in a process of its own (see mathematics.py): sympy may take for ever, and math-verify's own time limit works in a
main thread only. Imports nothing of lightrl.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import sympy
from math_verify import parse, verify

logging.getLogger("math_verify").setLevel(logging.CRITICAL)

_RELATIVE_TOLERANCE = 1e-5  # math-verify rounds to six decimals, which makes all tiny numbers equal
_DIGITS = 30
_GAP = re.compile(r"(?<=\d)\s+(?=\d)(?!\d{3}(?![\d/]))")  # as in builtin.py: 1 1/2 is not 11/2
_RATIO = re.compile(r"\d+(:\d+)+")


def equal(answer: str, gold: str) -> bool:
    """Tell whether ``answer`` is the same mathematical object as ``gold``; both without ``$`` or a box."""
    answer, gold = answer.strip(), gold.strip()
    if _squeezed(answer) == _squeezed(gold):
        return bool(gold)
    ratios = [_RATIO.fullmatch(text) for text in (answer, gold)]
    if any(ratios):  # clock times and ratios are no quotients
        return all(ratios) and _parts(answer) == _parts(gold)
    return _equal_objects(answer, gold)


def _squeezed(text: str) -> str:
    return "".join(_GAP.sub("_", text).split())


def _parts(text: str) -> list[int]:
    return [int(part) for part in text.split(":")]


def _equal_objects(answer: str, gold: str) -> bool:
    # The time limits are the parent's.
    left, right = (parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (answer, gold))
    if not left or not right or not verify(right, left, timeout_seconds=None):
        return False
    if "%" in answer or "%" in gold:  # 50% is 0.5, and 50 too
        return True
    return _close(left[0], right[0])


def _close(left: Any, right: Any) -> bool:
    """Compare the numbers in two objects by their size; True where they are not made of numbers."""
    numbers = [_numbers(value) for value in (left, right)]
    if None in numbers or len(numbers[0]) != len(numbers[1]):
        return True
    return all(
        abs(a - b) <= _RELATIVE_TOLERANCE * max(abs(a), abs(b)) for a, b in zip(numbers[0], numbers[1], strict=True)
    )


def _numbers(value: Any) -> Any:
    if isinstance(value, sympy.Eq):
        return _numbers(value.rhs)
    if isinstance(value, sympy.FiniteSet | sympy.Tuple):
        found = [_numbers(part) for part in value.args]
        flat = None if None in found else [n for part in found for n in part]
        if flat is None or not isinstance(value, sympy.FiniteSet):
            return flat
        return sorted(flat, key=lambda n: (sympy.re(n), sympy.im(n)))
    if isinstance(value, sympy.Expr) and value.is_number:
        number = value.evalf(_DIGITS)
        return [number] if number.is_finite else None
    return None
