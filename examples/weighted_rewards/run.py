"""Train with three rewards of different weights: ``python -m examples.weighted_rewards.run``."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: a model this small only waits for a second thread

import matplotlib
from lightning.pytorch import seed_everything
from lightning.pytorch.loggers import TensorBoardLogger
from matplotlib.figure import Figure

from examples.tiny.task import write_task
from examples.tiny.training import make_data, make_parser, make_trainer, train_and_tell
from lightrl import RLModule
from lightrl.report import read_scalars
from lightrl.rewards import LengthPenalty, RepetitionPenalty

TERMS = ("right", "short", "repeats")


def right(completion: str, ground_truth: str, **columns: object) -> float:
    """Return 1.0 where the first word is the right digit, whatever follows it."""
    return float(completion.split()[:1] == [ground_truth])


def main() -> None:
    """Train; each term of the reward is logged and drawn by itself."""
    args = make_parser("weighted_rewards", __doc__, 100, "of the order of prompts and of sampling").parse_args()
    seed_everything(args.seed, verbose=False)
    task = write_task(args.out)
    logger = TensorBoardLogger(args.out, name="")

    module = RLModule(task.model_dir, lr=1e-3, schedule="linear")
    data = make_data(
        task,
        reward={
            "right": right,
            "short": (LengthPenalty(free=2, limit=8), 0.3),  # a digit and the end: 2 tokens
            "repeats": (RepetitionPenalty(n=1), 0.1),
        },
        prompts_per_step=32,
        max_completion_tokens=8,
    )
    trainer = make_trainer(args.strategy, args.max_steps, logger=logger)
    train_and_tell(trainer, module, data, lambda: draw_terms(logger.log_dir))


def draw_terms(log_dir: str) -> Path:
    """Draw the mean of each term, before weights, over optimizer steps."""
    scalars = read_scalars(log_dir)
    picture = Path(log_dir) / "reward.png"
    with matplotlib.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        for term in TERMS:
            axes.plot(*scalars[f"reward/{term}"], linewidth=1.3, label=f"reward/{term}")
        axes.plot(*scalars["reward/mean"], color="black", linewidth=1.6, label="reward/mean (weighted sum)")
        axes.set(xlabel="optimizer step", ylabel="mean over completions")
        axes.grid(axis="y", color="#dddddd", linewidth=0.7)
        axes.legend(frameon=False)
        figure.savefig(picture, dpi=150)
    return picture


if __name__ == "__main__":
    main()
