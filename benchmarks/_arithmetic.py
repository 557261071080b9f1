"""Sums as questions: each pair of numbers is trained on or held out, in both orders."""

import itertools
import random
from typing import Any

from lightrl.rewards import numeric_match

LARGEST, PAIRS = 30, 128
SYSTEM = "Answer with an equation, such as 31 + 2 = 33."
TOKENS = 32
"""Of a completion, its end included."""

reward = numeric_match
Row = dict[str, Any]


def make_rows(pairs: int = PAIRS, seed: int = 0) -> tuple[list[Row], list[Row]]:
    """Return rows to train on, and rows of ``pairs`` pairs held out."""
    found = list(itertools.combinations_with_replacement(range(1, LARGEST + 1), 2))
    random.Random(seed).shuffle(found)
    return rows(found[pairs:]), rows(found[:pairs])


def rows(pairs: list[tuple[int, int]]) -> list[Row]:
    return [row(a, b) for pair in pairs for a, b in sorted({pair, pair[::-1]})]


def row(a: int, b: int) -> Row:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"What is {a} + {b}?"}]
    return {"prompt": messages, "answer": str(a + b)}
