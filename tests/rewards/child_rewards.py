"""Rewards for child processes, which start fast because nothing else is imported here."""

import re
import sys
from typing import Any


def backtracks(completion: str, ground_truth: str) -> float:
    """One call into C that holds the interpreter lock for ever."""
    return float(re.fullmatch(r"(a+)+b", completion) is not None)


def level(completion: str, *, level: int = 7) -> float:
    return float(level)


def fails(completion: str) -> float:
    raise ZeroDivisionError("boom")


def leaves(completion: str) -> float:
    sys.exit(3)


def unpicklable(completion: str) -> Any:
    return lambda: completion
