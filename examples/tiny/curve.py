"""The learning curve of a run as a picture, from its TensorBoard files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from lightrl.report import read_scalars

TRAIN, HELD_OUT = "reward/mean", "val/reward"


def draw_curve(log_dir: str | Path, picture: str | Path | None = None, title: str = "Largest of three digits") -> Path:
    """Draw training and held-out reward over optimizer steps and return where the picture is.

    Args:
        log_dir: folder with the run's event files.
        picture: PNG to write; None: ``reward.png`` in ``log_dir``.
        title: of the picture.
    """
    scalars = read_scalars(log_dir)
    picture = Path(picture or Path(log_dir) / "reward.png")
    with matplotlib.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        # A Figure of its own, not pyplot's: nobody's backend or open figures are touched.
        figure = Figure(figsize=(7, 4), layout="constrained")
        draw_rewards(figure.subplots(), scalars, title)
        figure.savefig(picture, dpi=150)
    return picture


def draw_rewards(axes: Any, scalars: dict[str, Any], title: str) -> None:
    """Draw both rewards into a matplotlib ``Axes``."""
    if TRAIN in scalars:
        axes.plot(*scalars[TRAIN], color="#4c78a8", linewidth=1.3, label="training prompts, sampled")
    if HELD_OUT in scalars:
        axes.plot(*scalars[HELD_OUT], "o-", color="#f58518", markersize=5, label="held-out prompts")
    axes.set(title=title, xlabel="optimizer step", ylabel="mean reward", ylim=(-0.02, 1.04))
    axes.set_xlim(left=0)
    axes.grid(axis="y", color="#dddddd", linewidth=0.7)
    axes.legend(loc="lower right", frameon=False)
