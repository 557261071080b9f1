"""Train with three rewards of different weights: ``python -m examples.weighted_rewards.run``."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: a model this small only waits for a second thread

import matplotlib
from lightning.pytorch import seed_everything
from lightning.pytorch.loggers import TensorBoardLogger
from matplotlib.figure import Figure

from examples.tiny.curve import read_scalars
from examples.tiny.task import write_task
from lightrl import RLModule, RolloutDataModule, Trainer
from lightrl.callbacks import SampleTable
from lightrl.rewards import LengthPenalty, RepetitionPenalty

TERMS = ("right", "short", "repeats")


def right(completion: str, ground_truth: str, **columns: object) -> float:
    """Return 1.0 where the first word is the right digit, whatever follows it."""
    return float(completion.split()[:1] == [ground_truth])


def main() -> None:
    """Train; each term of the reward is logged and drawn by itself."""
    args = _arguments()
    seed_everything(args.seed, verbose=False)
    task = write_task(args.out)
    logger = TensorBoardLogger(args.out, name="")

    module = RLModule(task.model_dir, lr=1e-3, schedule="linear")
    data = RolloutDataModule(
        str(task.train),
        reward={
            "right": right,
            "short": (LengthPenalty(free=2, limit=8), 0.3),  # a digit and the end: 2 tokens
            "repeats": (RepetitionPenalty(n=1), 0.1),
        },
        group_size=16,
        prompts_per_step=32,
        max_completion_tokens=8,
        val_prompts=str(task.test),
    )
    trainer = Trainer(
        strategy=args.strategy,
        accelerator="cpu",
        devices=1,
        max_steps=args.max_steps,
        gradient_clip_val=1.0,
        val_check_interval=20,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        logger=logger,
        callbacks=[SampleTable(every_n_steps=50)],
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    before = trainer.validate(module, data, verbose=False)[0]["val/reward"]
    trainer.fit(module, data)
    after = trainer.validate(module, data, verbose=False)[0]["val/reward"]
    print(f"learning curve: {draw_terms(logger.log_dir)}")
    print(f"held-out reward: {before:.3f} -> {after:.3f}")


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


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.weighted_rewards.run", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/weighted_rewards"), help="folder for the runs")
    parser.add_argument("--max-steps", type=int, default=100, help="optimizer steps")
    parser.add_argument("--strategy", default="colocated_vllm", choices=["colocated_vllm", "colocated_hf"])
    parser.add_argument("--seed", type=int, default=0, help="of the order of prompts and of sampling")
    return parser.parse_args()


if __name__ == "__main__":
    main()
