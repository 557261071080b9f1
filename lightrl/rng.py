"""Random state: sampling has a generator state of its own and leaves the trainer's untouched (invariant 8)."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states


def derive_seed(*parts: int | str) -> int:
    """Return a seed in [0, 2**31) that is a hash of ``parts``: equal parts, equal seed; neighbours are unrelated.

    Example:
        >>> derive_seed(1, "rollout", 7) == derive_seed(1, "rollout", 7) != derive_seed(1, "rollout", 8)
        True
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % 2**31


@contextmanager
def forked_rng(seed: int) -> Iterator[None]:
    """Seed Python, NumPy and torch with ``seed`` inside the block and put their state back after it."""
    with _state_kept():
        _seed_all(seed)
        yield


class OwnRandomState:
    """Random state that goes on from block to block while the process's own stands still.

    Args:
        seed: of the first block.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._state: dict[str, Any] | None = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Draw from it inside the block."""
        with _state_kept():
            if self._state is None:
                _seed_all(self._seed)
            else:
                _set_rng_states(self._state)
            yield
            self._state = _collect_rng_states()


def _seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@contextmanager
def _state_kept() -> Iterator[None]:
    before = _collect_rng_states()
    try:
        yield
    finally:
        _set_rng_states(before)
