"""The order in which prompts are visited: endless, shuffled by epoch, resumable at any row."""

from __future__ import annotations

from typing import Any

import numpy as np


class PromptOrder:
    """Endless stream of row indices; epoch ``e`` is a permutation derived from ``(seed, e)`` alone.

    It knows nothing of ranks (they slice what :meth:`take` returns) and leaves the global random state alone.

    Args:
        num_prompts: Rows in the data set.
        seed: Seed of all epochs, >= 0.
        shuffle: False visits the rows in their own order, every epoch.

    Raises:
        ValueError: If there are no prompts, or the seed is negative.

    Example:
        >>> order = PromptOrder(3, seed=0, shuffle=False)
        >>> order.take(2), order.take(2), order.epoch
        ([0, 1], [2, 0], 1)
    """

    def __init__(self, num_prompts: int, seed: int, shuffle: bool = True) -> None:
        if num_prompts < 1:
            raise ValueError(f"num_prompts={num_prompts}: there is no prompt to visit. Give a data set with rows.")
        if seed < 0:
            raise ValueError(f"seed={seed}: must be 0 or more.")
        self.num_prompts = num_prompts
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0
        self.position = 0
        self._rows = self._permutation()

    def take(self, n: int) -> list[int]:
        """Return the next ``n`` row indices; the rest of an epoch is carried over into the next call, never dropped.

        Raises:
            ValueError: If ``n`` is negative.
        """
        if n < 0:
            raise ValueError(f"take({n}): the number of rows must be 0 or more.")
        taken: list[int] = []
        while len(taken) < n:
            if self.position == len(self._rows):
                self.epoch, self.position = self.epoch + 1, 0
                self._rows = self._permutation()
            piece = self._rows[self.position : self.position + n - len(taken)]
            taken += piece
            self.position += len(piece)
        return taken

    def state_dict(self) -> dict[str, Any]:
        """Return the exact position, in plain integers."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "seed": self.seed,
            "num_prompts": self.num_prompts,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` was taken, with the seed it was taken with.

        Raises:
            ValueError: If the data set has another number of rows than it had then.
        """
        if state["num_prompts"] != self.num_prompts:
            raise ValueError(
                f"the checkpoint was written with {state['num_prompts']} prompts and the data set now has "
                f"{self.num_prompts}: the order cannot be continued. Resume with the same data, or start without "
                "ckpt_path."
            )
        self.epoch, self.position, self.seed = int(state["epoch"]), int(state["position"]), int(state["seed"])
        self._rows = self._permutation()

    def _permutation(self) -> list[int]:
        if not self.shuffle:
            return list(range(self.num_prompts))
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence((self.seed, self.epoch))))
        return [int(i) for i in generator.permutation(self.num_prompts)]
