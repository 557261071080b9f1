"""Checks of what users hand in: one clear error for each, naming the value."""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Iterable
from typing import Any

from torch import Tensor


def check_numbers(upper: float = math.inf, **values: Any) -> None:
    """Raise ValueError unless every value is a number, finite, 0 or more, and below ``upper``."""
    for name, value in values.items():
        if not isinstance(value, numbers.Real) or not 0 <= float(value) < upper:
            bound = "" if upper == math.inf else f" and below {upper:g}"
            raise ValueError(f"{name}={value!r} must be a finite number, 0 or more{bound}")


def check_count(name: str, value: Any) -> None:
    """Raise ValueError unless ``value`` is a whole number of steps, 0 or more."""
    if not _is_whole(value):
        raise ValueError(f"{name}={value!r} must be a whole number of optimizer steps, 0 or more")
    if value < 0:
        raise ValueError(f"{name}={value} must be 0 or more: it counts optimizer steps")


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the end of an error that names what ``name`` was perhaps meant to be; empty where nothing is like it."""
    near = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def check_at_least_one(**counts: int | None) -> None:
    """Raise ValueError unless every count is a whole number, 1 or more, or None where that means no limit."""
    for name, count in counts.items():
        if count is None:
            continue
        if not _is_whole(count):
            raise ValueError(f"{name}={count!r} must be a whole number")
        if count < 1:
            raise ValueError(f"{name}={count} must be at least 1")


def _is_whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_betas(betas: Any) -> None:
    """Raise ValueError unless ``betas`` are AdamW's two."""
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"betas={betas!r} must be two numbers, such as (0.9, 0.99)")
    if not all(isinstance(beta, numbers.Real) and 0 <= float(beta) < 1 for beta in betas):
        raise ValueError(f"each of betas={betas!r} must be 0 or more and below 1")


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(choices)}")


def check_correction(correction: Any) -> None:
    """Raise ValueError unless ``correction`` can be called as one (a class has to be made an object first)."""
    if correction is not None and (isinstance(correction, type) or not callable(correction)):
        raise ValueError(
            f"correction={correction!r} is not a function of a micro-batch and its old_logprobs: give an object such "
            "as lightrl.corrections.TruncatedToken()"
        )


def check_loss(owner: str, found: Any) -> tuple[Tensor, dict[str, Tensor | float]]:
    """Return what ``owner``'s ``loss`` returned; ValueError unless it is a scalar tensor and a dict."""
    pair = found if isinstance(found, tuple) and len(found) == 2 else (None, None)
    if not (isinstance(pair[0], Tensor) and pair[0].ndim == 0 and isinstance(pair[1], dict)):
        raise ValueError(
            f"{owner}.loss returned {_described(found)}: it must return a scalar tensor (self.aggregate makes one of "
            "terms by token) and a dict of metrics (perhaps {})"
        )
    return pair[0], pair[1]


def _described(found: Any) -> str:
    if isinstance(found, tuple):
        return "(" + ", ".join(map(_described, found)) + ")"
    return f"a tensor of shape {list(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
