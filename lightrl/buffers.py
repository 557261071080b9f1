"""Several tensors in one buffer of bytes."""

from __future__ import annotations

from collections.abc import Iterable

ALIGNMENT = 16
"""Bytes: what any dtype and the widest loads of a GPU want."""


def spans(sizes: Iterable[int]) -> list[slice]:
    """Return where each of them lies, by their sizes in bytes: one after the other, each aligned."""
    found, end = [], 0
    for size in sizes:
        start = aligned(end)
        end = start + size
        found.append(slice(start, end))
    return found


def aligned(size: int) -> int:
    """Return ``size``, rounded up to a whole ``ALIGNMENT``."""
    return -(-size // ALIGNMENT) * ALIGNMENT
