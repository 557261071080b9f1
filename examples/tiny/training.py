"""How the examples train: the demo's data, a Trainer that suits a tiny model on a CPU, and what a person is told."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from examples.tiny.task import TinyTask, reward
from lightrl import RolloutDataModule, Trainer
from lightrl.callbacks import SampleTable


def make_data(task: TinyTask, **changes: Any) -> RolloutDataModule:
    """Return the demo's data, with other settings where ``changes`` has them."""
    settings: dict[str, Any] = {
        "reward": reward,
        "group_size": 16,
        "prompts_per_step": 64,
        "max_completion_tokens": 4,
        "val_prompts": str(task.test),
    }
    return RolloutDataModule(str(task.train), **settings | changes)


def make_trainer(strategy: Any, max_steps: int, samples_every: int | None = 50, **changes: Any) -> Trainer:
    """Return the demo's Trainer, with other settings where ``changes`` has them; ``samples_every`` steps a table."""
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "gradient_clip_val": 1.0,
        "val_check_interval": 20,
        "check_val_every_n_epoch": None,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
        "callbacks": [SampleTable(every_n_steps=samples_every)] if samples_every else [],
        "enable_checkpointing": False,
        "enable_model_summary": False,
    }
    return Trainer(strategy=strategy, max_steps=max_steps, **settings | changes)


def train_and_tell(trainer: Trainer, module: Any, data: RolloutDataModule, draw: Callable[[], Path]) -> None:
    """Train; print the held-out reward before and after, and where the picture is that ``draw`` makes."""
    before = trainer.validate(module, data, verbose=False)[0]["val/reward"]
    trainer.fit(module, data)
    after = trainer.validate(module, data, verbose=False)[0]["val/reward"]
    print(f"learning curve: {draw()}")
    print(f"held-out reward: {before:.3f} -> {after:.3f}")


def make_parser(name: str, description: str | None, max_steps: int, seed: str) -> argparse.ArgumentParser:
    """Return the arguments that every example of rewards and environments takes; ``seed`` says what it is of."""
    parser = argparse.ArgumentParser(prog=f"python -m examples.{name}.run", description=description)
    parser.add_argument("--out", type=Path, default=Path("runs") / name, help="folder for the runs")
    parser.add_argument("--max-steps", type=int, default=max_steps, help="optimizer steps")
    parser.add_argument("--strategy", default="colocated_vllm", choices=["colocated_vllm", "colocated_hf"])
    parser.add_argument("--seed", type=int, default=0, help=seed)
    return parser
