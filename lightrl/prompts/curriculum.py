"""A curriculum: a function of the user's that says which prompts come in an epoch, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from lightrl.prompts.order import PromptOrder
from lightrl.types import Prompt

Curriculum = Callable[[Sequence[Prompt], int, Mapping[int, float], np.random.Generator], Sequence[int]]
"""``curriculum(prompts, epoch, mean_rewards, rng) -> rows``.

``mean_rewards`` maps the rows visited so far to the mean reward of their last visit; ``rows`` are positions in
``prompts``, at least one, any of them any number of times. When they are used up, the next epoch is asked for.
"""


class CurriculumOrder(PromptOrder):
    """Visits prompts as a curriculum says.

    Args:
        prompts: all prompts.
        seed: of the generator that the curriculum gets, together with the epoch.
        curriculum: see :data:`Curriculum`.

    Example:
        >>> def shortest_first(prompts, epoch, mean_rewards, rng):
        ...     return sorted(range(len(prompts)), key=lambda i: len(prompts[i].token_ids))
        >>> CurriculumOrder([Prompt([1, 2]), Prompt([3])], 0, shortest_first).take(3)
        [1, 0, 1]
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int, curriculum: Curriculum) -> None:
        self.prompts, self.curriculum = prompts, curriculum
        self.mean_rewards: dict[int, float] = {}
        super().__init__(len(prompts), seed)

    def note(self, rewards: Mapping[int, float]) -> None:
        """Remember the mean reward of each row that was visited."""
        self.mean_rewards.update(rewards)

    def _permutation(self) -> list[int]:
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence((self.seed, self.epoch))))
        rows = [int(row) for row in self.curriculum(self.prompts, self.epoch, dict(self.mean_rewards), rng)]
        wrong = [row for row in rows if not 0 <= row < self.num_prompts]
        if wrong or not rows:
            what = f"the row {wrong[0]}, and there are {self.num_prompts}" if wrong else "no row"
            raise ValueError(f"the curriculum gave {what} for epoch {self.epoch}: return positions in prompts")
        return rows

    def state_dict(self) -> dict[str, Any]:
        """Return the exact position, with what the curriculum has said for this epoch."""
        return super().state_dict() | {"rows": list(self._rows), "mean_rewards": dict(self.mean_rewards)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` was taken; see :class:`PromptOrder`."""
        self.mean_rewards = dict(state["mean_rewards"])
        super().load_state_dict(state)
        self._rows = list(state["rows"])
