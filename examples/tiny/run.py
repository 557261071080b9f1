"""Train a tiny model from nothing with GRPO: ``python -m examples.tiny.run``."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: a model this small only waits for a second thread

from lightning.pytorch import seed_everything
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from examples.tiny.curve import draw_curve
from examples.tiny.task import write_task
from examples.tiny.training import make_data, make_trainer
from lightrl import RLModule

MAX_STEPS = 80


def main() -> None:
    """Train, and say what came out."""
    args = _arguments()
    seed_everything(args.seed, verbose=False)
    task = write_task(args.out)
    logger = TensorBoardLogger(args.out, name="")
    say(f"run: {logger.log_dir}")

    module = RLModule(task.model_dir, lr=1e-3, schedule="linear")
    data = make_data(task)
    trainer = make_trainer(args.strategy, args.max_steps, devices=args.devices, logger=logger)

    before = trainer.validate(module, data, verbose=False)[0]["val/pass@1"]
    say(f"held-out pass@1 before training: {before:.3f}")
    started = time.perf_counter()
    trainer.fit(module, data)
    seconds = time.perf_counter() - started
    after = trainer.validate(module, data, verbose=False)[0]["val/pass@1"]
    say(f"training took {seconds:.0f} s")
    if trainer.is_global_zero:
        picture = draw_curve(logger.log_dir)
        say(f"learning curve: {picture}  (TensorBoard: tensorboard --logdir {logger.log_dir})")
    say(f"held-out pass@1: {after:.3f}")


@rank_zero_only
def say(line: str) -> None:
    """Print from one process only, and at once: the progress bar writes to another stream."""
    print(line, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.tiny.run", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/tiny"), help="folder for model, data and runs")
    parser.add_argument("--max-steps", type=int, default=MAX_STEPS, help="optimizer steps")
    strategies = ["colocated_vllm", "colocated_hf", "async_vllm"]
    parser.add_argument("--strategy", default="colocated_vllm", choices=strategies)
    parser.add_argument("--seed", type=int, default=0, help="of the order of prompts and of sampling")
    parser.add_argument("--devices", type=int, default=1, help="processes to train on")
    return parser.parse_args()


if __name__ == "__main__":
    main()
