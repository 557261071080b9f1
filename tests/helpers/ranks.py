"""Programs that a test runs on two ranks, and what each rank leaves behind."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from lightrl import RLModule
from lightrl.distributed import rank
from lightrl.strategies import ColocatedHFStrategy, ColocatedVLLMStrategy

STRATEGIES: dict[str, Callable[[], Any]] = {
    "hf": lambda: ColocatedHFStrategy(),
    "tp1": lambda: ColocatedVLLMStrategy(tensor_parallel_size=1),
    "tp2": lambda: ColocatedVLLMStrategy(tensor_parallel_size=2),
}


def run(
    module: str, name: str, *args: Any, timeout: float = 600, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run a program of a test module on two ranks: Lightning starts the second."""
    command = [sys.executable, "-m", module, name, *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def of_each_rank(folder: Path) -> list[Any]:
    return [torch.load(folder / f"{r}.pt", weights_only=False) for r in (0, 1)]


def keep(folder: str, value: Any) -> None:
    torch.save(value, Path(folder) / f"{rank()}.pt")


class SGDModule(RLModule):
    """Adam would blow rounding up wherever a gradient is nearly nothing."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.policy.parameters(), lr=1.0)


class Samples(Callback):
    def __init__(self) -> None:
        self.ids: list[list[tuple[list[int], list[int]]]] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.ids.append([(r.prompt_ids, r.completion_ids) for r in batch.rollouts])
