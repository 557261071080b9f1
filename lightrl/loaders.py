"""What Lightning iterates over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


class SizedLoader:
    """An iterable with a length: Lightning fetches its next item only when a step wants it, never one ahead.

    Args:
        size: items in an epoch.
        item: makes item ``i`` of the epoch.
    """

    def __init__(self, size: int, item: Callable[[int], Any]) -> None:
        self.size, self.item = size, item

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[Any]:
        for i in range(self.size):
            yield self.item(i)
