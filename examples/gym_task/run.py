"""Train a tiny model from nothing on a reasoning-gym task: ``python -m examples.gym_task.run``."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: a model this small only waits for a second thread

from lightning.pytorch import seed_everything
from lightning.pytorch.loggers import TensorBoardLogger

from examples.tiny.curve import draw_curve
from examples.tiny.task import VOCABULARY, make_model, make_tokenizer
from lightrl import RLModule, RolloutDataModule, Trainer
from lightrl.callbacks import SampleTable
from lightrl.prompts import gym_rows
from lightrl.rewards import gym_score

TASK = "gym:gcd?min_numbers=2&max_numbers=2&min_value=1&max_value=10"


def main() -> None:
    """Train on problems of one seed, test on those of another."""
    args = _arguments()
    seed_everything(args.seed, verbose=False)
    logger = TensorBoardLogger(args.out, name="")
    words = vocabulary()
    tokenizer = make_tokenizer(words)

    module = RLModule(make_model(args.seed, words), lr=1e-3, schedule="linear")
    data = RolloutDataModule(
        f"{TASK}&size=6400&seed=1",
        reward=gym_score,
        group_size=16,
        prompts_per_step=48,
        max_completion_tokens=2,
        val_prompts=f"{TASK}&size=200&seed=2",
        tokenizer=tokenizer,
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
    print(f"learning curve: {draw_curve(logger.log_dir, title='reasoning-gym: gcd')}")
    print(f"held-out reward: {before:.3f} -> {after:.3f}")


def vocabulary() -> list[str]:
    """Return the words of the task's questions, and every number that may be an answer."""
    questions = gym_rows("gcd", size=500, min_numbers=2, max_numbers=2, min_value=1, max_value=10)
    said = {word for row in questions for word in row["prompt"][0]["content"].split()}
    return list(dict.fromkeys([*VOCABULARY, *sorted(said), *(str(n) for n in range(1, 11))]))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.gym_task.run", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/gym_task"), help="folder for the runs")
    parser.add_argument("--max-steps", type=int, default=120, help="optimizer steps")
    parser.add_argument("--strategy", default="colocated_vllm", choices=["colocated_vllm", "colocated_hf"])
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of sampling")
    return parser.parse_args()


if __name__ == "__main__":
    main()
