"""Random state: sampling has a generator state of its own and leaves the trainer's untouched (invariant 8)."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


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
    before = random_state()
    try:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        yield
    finally:
        set_random_state(before)


def random_state() -> dict[str, Any]:
    """Return the state of the global generators of Python, NumPy and torch, as plain builtins and tensors."""
    generator: Any = np.random.get_state()
    kind, keys, *rest = generator
    state = {"python": random.getstate(), "numpy": (kind, keys.tolist(), *rest), "torch": torch.get_rng_state()}
    return state | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else {})


def set_random_state(state: dict[str, Any]) -> None:
    """Go back to what :func:`random_state` returned."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])


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
        with forked_rng(self._seed):
            if self._state is not None:
                set_random_state(self._state)
            yield
            self._state = random_state()
