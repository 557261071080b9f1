"""Rewards of a completion's form: its format, its length, its repetitions."""

from __future__ import annotations

import regex


class FormatMatch:
    r"""1.0 where the whole completion matches a regular expression.

    Args:
        pattern: in the syntax of the ``regex`` package, a superset of Python's ``re``; ``.`` matches newlines too.
        timeout: seconds after which a match is given up with a ``TimeoutError``.

    Raises:
        ValueError: it is no regular expression.

    Example:
        >>> thinks = FormatMatch(r"<think>.*</think>\s*\S.*")
        >>> thinks("<think>6 * 7</think> 42"), thinks("42")
        (1.0, 0.0)
    """

    def __init__(self, pattern: str, timeout: float = 5.0) -> None:
        try:
            self.pattern = regex.compile(pattern, regex.DOTALL)
        except regex.error as error:
            raise ValueError(f"pattern={pattern!r} is no regular expression: {error}") from error
        self.timeout = timeout

    def __call__(self, completion: str) -> float:
        """Return 1.0 or 0.0."""
        # concurrent: without the interpreter lock, which would hold up training and the deadlines of other rewards.
        return float(self.pattern.fullmatch(completion, timeout=self.timeout, concurrent=True) is not None)


class LengthPenalty:
    """0 up to ``free`` tokens, then falling in a straight line to -1 at ``limit`` and beyond.

    Args:
        free: longest completion without a penalty, in tokens.
        limit: length from which the whole penalty is due.

    Raises:
        ValueError: ``free`` is negative or not below ``limit``.

    Example:
        >>> LengthPenalty(free=2, limit=4)("", completion_ids=[7, 8, 9])
        -0.5
    """

    def __init__(self, free: int, limit: int) -> None:
        if not 0 <= free < limit:
            raise ValueError(f"free={free}, limit={limit}: wanted 0 <= free < limit, in tokens")
        self.free, self.limit = free, limit

    def __call__(self, completion: str, *, completion_ids: list[int]) -> float:
        """Return a number in [-1, 0]."""
        over = len(completion_ids) - self.free
        return -min(1.0, max(0.0, over / (self.limit - self.free)))


class RepetitionPenalty:
    """Minus the share of token n-grams that came before: 0 for none, towards -1 for a loop.

    Args:
        n: tokens in an n-gram.

    Raises:
        ValueError: ``n`` is below 1.

    Example:
        >>> RepetitionPenalty(n=2)("", completion_ids=[7, 8, 7, 8, 7])
        -0.5
    """

    def __init__(self, n: int = 4) -> None:
        if n < 1:
            raise ValueError(f"n={n}: must be at least 1 token")
        self.n = n

    def __call__(self, completion: str, *, completion_ids: list[int]) -> float:
        """Return a number in (-1, 0]."""
        grams = list(zip(*(completion_ids[i:] for i in range(self.n)), strict=False))
        return len(set(grams)) / len(grams) - 1.0 if grams else 0.0
