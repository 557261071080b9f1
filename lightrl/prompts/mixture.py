"""Several data sources in fixed proportions."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from lightrl.prompts.order import PromptOrder
from lightrl.rng import derive_seed


def weighted_sources(prompts: Any) -> list[tuple[Any, float]]:
    """Return (source, weight) pairs: of a mapping of source to weight, of a list of such pairs, or one with weight 1.

    Raises:
        ValueError: a weight is not a finite number above 0.
    """
    if isinstance(prompts, Mapping):
        pairs = list(prompts.items())
    elif isinstance(prompts, list | tuple) and prompts and all(isinstance(p, tuple) and len(p) == 2 for p in prompts):
        pairs = list(prompts)
    else:
        return [(prompts, 1.0)]
    for source, weight in pairs:
        if isinstance(weight, bool) or not isinstance(weight, numbers.Real) or not 0 < float(weight) < math.inf:
            raise ValueError(f"the weight of {str(source)[:80]!r} is {weight!r}: it must be a number above 0")
    return pairs


class MixedOrder:
    """Visits several sources in proportion to their weights, each in a :class:`PromptOrder` of its own.

    After any number of rows each source has had its share to within two rows, so that steps are mixed alike.

    Args:
        sizes: rows of each source; rows of the second count on from those of the first.
        weights: share of each, in any unit.
        seed: of all epochs.
        shuffle: see :class:`PromptOrder`.

    Example:
        >>> MixedOrder([2, 9], [1.0, 2.0], seed=0, shuffle=False).take(6)
        [2, 0, 3, 4, 1, 5]
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int, shuffle: bool = True) -> None:
        self.seed = seed
        self.weights = [w / sum(weights) for w in weights]
        self._firsts = [sum(sizes[:i]) for i in range(len(sizes))]
        self._orders = [PromptOrder(n, derive_seed(seed, "source", i), shuffle) for i, n in enumerate(sizes)]
        self._taken = [0] * len(sizes)

    def take(self, n: int) -> list[int]:
        """Return the next ``n`` row indices."""
        rows = []
        for _ in range(n):
            visited = sum(self._taken) + 1
            behind = [w * visited - taken for w, taken in zip(self.weights, self._taken, strict=True)]
            i = behind.index(max(behind))
            self._taken[i] += 1
            rows.append(self._firsts[i] + self._orders[i].take(1)[0])
        return rows

    def state_dict(self) -> dict[str, Any]:
        """Return the exact position, in plain builtins."""
        return {
            "seed": self.seed,
            "weights": list(self.weights),
            "taken": list(self._taken),
            "sources": [order.state_dict() for order in self._orders],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` was taken.

        Raises:
            ValueError: the sources or weights are other ones than then.
        """
        if state.get("weights") != self.weights:
            raise ValueError(
                f"the checkpoint was written with the source weights {state.get('weights')} and they are now "
                f"{self.weights}: resume with the same sources and weights, or start without ckpt_path"
            )
        self.seed, self._taken = int(state["seed"]), list(state["taken"])
        for order, theirs in zip(self._orders, state["sources"], strict=True):
            order.load_state_dict(theirs)
