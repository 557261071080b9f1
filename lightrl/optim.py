"""The optimizer, and learning rate schedules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch

SCHEDULES = ("constant", "linear", "cosine")


def make_optimizer(
    parameters: Iterable[torch.nn.Parameter], *, lr: float, betas: tuple[float, float], weight_decay: float
) -> torch.optim.AdamW:
    """Return AdamW on the parameters that are trained, without decay on vectors; fused on CUDA."""
    trained = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    fused = any(p.device.type == "cuda" for p in trained)
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=betas, fused=fused)


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
