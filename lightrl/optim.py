"""Learning rate schedules."""

from __future__ import annotations

import math
from collections.abc import Callable

SCHEDULES = ("constant", "linear", "cosine")


def schedule_factor(schedule: str, warmup_steps: int, total_steps: float | None) -> Callable[[int], float]:
    """Return the factor on the peak learning rate as a function of optimizer steps done.

    Args:
        schedule: ``"constant"``, ``"linear"`` or ``"cosine"``.
        warmup_steps: steps over which the factor rises from 0 to 1.
        total_steps: the step at which linear and cosine reach 0; they need it.

    Raises:
        ValueError: the run has no known end and the schedule needs one.

    Example:
        >>> f = schedule_factor("linear", 2, 10)
        >>> [f(s) for s in (0, 1, 2, 6, 10)]
        [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    if schedule != "constant" and (total_steps is None or math.isinf(total_steps)):
        raise ValueError(
            f"schedule={schedule!r} needs to know the run's length: set Trainer(max_steps=...) or max_epochs"
        )

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        if schedule == "constant" or total_steps is None:
            return 1.0
        done = min(1.0, (step - warmup_steps) / max(1.0, total_steps - warmup_steps))
        return 1.0 - done if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))

    return factor
