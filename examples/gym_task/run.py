"""Train a tiny model from nothing on a reasoning-gym task: ``python -m examples.gym_task.run``."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: a model this small only waits for a second thread

from lightning.pytorch import seed_everything
from lightning.pytorch.loggers import TensorBoardLogger
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from examples.tiny.curve import draw_curve
from examples.tiny.task import VOCABULARY, make_model, make_tokenizer
from examples.tiny.training import make_parser, make_trainer, train_and_tell
from lightrl import RLModule, RolloutDataModule
from lightrl.prompts import gym_rows
from lightrl.rewards import gym_score

TASK = "gym:gcd?min_numbers=2&max_numbers=2&min_value=1&max_value=10"


def main() -> None:
    """Train on problems of one seed, test on those of another."""
    args = make_parser("gym_task", __doc__, max_steps=120, seed="of the weights and of sampling").parse_args()
    seed_everything(args.seed, verbose=False)
    logger = TensorBoardLogger(args.out, name="")

    module = RLModule(task_model(args.seed), lr=1e-3, schedule="linear")
    data = RolloutDataModule(
        f"{TASK}&size=6400&seed=1",
        reward=gym_score,
        group_size=16,
        prompts_per_step=48,
        max_completion_tokens=2,
        val_prompts=f"{TASK}&size=200&seed=2",
        tokenizer=task_tokenizer(),
    )
    trainer = make_trainer(args.strategy, args.max_steps, logger=logger)
    train_and_tell(trainer, module, data, lambda: draw_curve(logger.log_dir, title="reasoning-gym: gcd"))


def task_model(seed: int = 0) -> PreTrainedModel:
    """Return an untrained model that knows the task's words."""
    return make_model(seed, vocabulary())


def task_tokenizer() -> PreTrainedTokenizerBase:
    """Return its tokenizer."""
    return make_tokenizer(vocabulary())


def vocabulary() -> list[str]:
    """Return the words of the task's questions, and every number that may be an answer."""
    questions = gym_rows("gcd", size=500, min_numbers=2, max_numbers=2, min_value=1, max_value=10)
    said = {word for row in questions for word in row["prompt"][0]["content"].split()}
    return list(dict.fromkeys([*VOCABULARY, *sorted(said), *(str(n) for n in range(1, 11))]))


if __name__ == "__main__":
    main()
