"""Benchmarks: each module here measures one figure and compares it with its bar (see README.md)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    """What one benchmark found.

    Example::

        Result(figure="0.98 held-out", bar=">= 0.95", ok=True, table="step  reward\n...")
    """

    figure: str
    """The measured figure, with its unit."""
    bar: str
    """What the figure must reach."""
    ok: bool
    """Whether it does."""
    table: str
    """The figures in full, side by side with their baseline."""
