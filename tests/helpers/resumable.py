"""A short run with everything in it that a checkpoint has to bring back, and a trace of all it does."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor

from lightrl import RLModule
from lightrl.distributed import rank
from lightrl.packing import MicroBatch
from lightrl.strategies import AsyncVLLMStrategy, ColocatedHFStrategy, ColocatedVLLMStrategy
from tests.faults import Fault, Saboteur, rewarded
from tests.helpers.fits import quiet_trainer, share_of_even_words, tiny_data
from tests.helpers.tiny import tiny_model, tiny_prompts
from tests.helpers.training import whole

STEPS, VALIDATE_EVERY = 6, 3
STRATEGIES = {
    "colocated_hf": ColocatedHFStrategy,
    "colocated_vllm": ColocatedVLLMStrategy,
    "async_vllm": AsyncVLLMStrategy,
}
TIMED = ("time/", "perf/")


class Noisy(RLModule):
    """Draws random numbers while it trains, from every generator."""

    def loss(self, batch: MicroBatch, logprobs: Tensor) -> tuple[Tensor, dict[str, Tensor | float]]:
        loss, metrics = super().loss(batch, logprobs)
        return loss * (1 + torch.rand(()) + random.random() + np.random.rand()), metrics


class Trace(Logger):
    """Appends what is logged to a file, in order; what takes time is left out."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    name = version = property(lambda self: "trace")  # type: ignore[assignment]

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        kept = {k: v for k, v in metrics.items() if not k.startswith(TIMED)}
        self.write({"logged": step, "validation": any(k.startswith("val/") for k in kept), "value": kept})

    def write(self, line: dict[str, Any]) -> None:
        with (self.folder / f"trace.{rank()}").open("a") as file:
            file.write(json.dumps(line) + "\n")


class Samples(Callback):
    """Traces the tokens of every step, on every rank."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        tokens = [[r.prompt_ids, r.completion_ids] for r in batch.rollouts]
        where = [trainer.current_epoch, batch_idx, trainer.optimizers[0].param_groups[0]["lr"]]
        self.trace.write({"step": trainer.global_step, "value": [tokens, where, batch.policy_version]})


def read_trace(folder: Path, of_rank: int) -> tuple[dict[str, Any], list[str]]:
    """What was traced, by what it is of, and those entries that differ the second time."""
    found: dict[str, Any] = {}
    wrong = []
    path = folder / f"trace.{of_rank}"
    for line in path.read_text().splitlines() if path.exists() else []:
        entry = json.loads(line)
        value = entry.pop("value")
        key = str(entry)
        if found.setdefault(key, value) != value:
            wrong.append(f"{key} differs when it is done again")
    return found, wrong


def train(
    folder: str,
    fault: Fault | None,
    strategy: str,
    ranks: int,
    ckpt_path: str | None,
    timeout: float = 60.0,
    save_every: int = 1,
    **strategy_args: Any,
) -> None:
    """Train for a few steps with a checkpoint after each; the end's state goes to ``folder``/end.RANK."""
    torch.set_num_threads(1)
    seed_everything(7, verbose=False)
    saboteur, trace = Saboteur(fault), Trace(Path(folder))
    module = Noisy(tiny_model(), lr=1e-3, schedule="cosine", warmup_steps=2, kl_coef=0.05)
    settings: dict[str, Any] = {"max_tokens_per_micro_batch": 20, "minibatches_per_rollout": 2}
    settings |= {"val_prompts": tiny_prompts(4), "val_batch_size": 2, "seed": None}
    prompts = tiny_data(tiny_prompts(10), reward=rewarded(saboteur, share_of_even_words), **settings)
    saving = ModelCheckpoint(folder, every_n_train_steps=save_every, save_last=True)
    trainer = quiet_trainer(
        STRATEGIES[strategy](timeout=timeout, **strategy_args),
        devices=ranks,
        max_steps=STEPS,
        callbacks=[Samples(trace), saving, saboteur],
        logger=trace,
        default_root_dir=folder,
        enable_checkpointing=True,
        gradient_clip_val=1.0,
        val_check_interval=VALIDATE_EVERY,
        check_val_every_n_epoch=None,
        log_every_n_steps=1,
    )
    trainer.fit(module, prompts, ckpt_path=ckpt_path)
    torch.save(final_state(trainer, module), Path(folder) / f"end.{rank()}")
    (Path(folder) / f"reached.{rank()}").write_text(json.dumps(sorted(saboteur.reached)))


def final_state(trainer: Any, module: Any) -> dict[str, Any]:
    optimizer = trainer.optimizers[0]
    moments = [{k: whole(v) for k, v in optimizer.state[p].items()} for p in module.policy.parameters()]
    return {
        "weights": {n: whole(p) for n, p in module.policy.named_parameters()},
        "optimizer": moments,
        "scheduler": trainer.lr_scheduler_configs[0].scheduler.state_dict()["last_epoch"],
        "steps": (trainer.global_step, trainer.current_epoch, trainer.fit_loop.epoch_loop._batches_that_stepped),
        "random": (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()),
        "metrics": {k: float(v) for k, v in trainer.callback_metrics.items() if not k.startswith(TIMED)},
    }


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    """Where two states are not bitwise equal."""
    if isinstance(a, dict):
        keys = [f"{where} lacks {k}" for k in a.keys() ^ b.keys()]
        return keys + [d for k in a.keys() & b.keys() for d in differences(a[k], b[k], f"{where}/{k}")]
    if isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return [f"{where} has {len(a)} and {len(b)} entries"]
        return [d for i, (x, y) in enumerate(zip(a, b, strict=True)) for d in differences(x, y, f"{where}/{i}")]
    same = torch.equal(a, b) if isinstance(a, Tensor) else a == b
    return [] if same else [where]
