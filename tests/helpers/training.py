"""A module, a datamodule and a Trainer small enough to fit in a fraction of a second, without vLLM."""

import tempfile
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch.distributed.tensor import DTensor

from lightrl import RLModule, RolloutBatch, RolloutDataModule
from lightrl.packing import StepBatch
from tests.helpers.tiny import tiny_model, tiny_prompts, tiny_tokenizer


def reward_even(completion: str) -> float:
    """Share of the words w0..w31 with an even number: differs from sample to sample."""
    words = completion.split()
    return sum(int(w[1:]) % 2 == 0 for w in words if w[1:].isdigit()) / max(1, len(words))


def tiny_module(**args: Any) -> RLModule:
    return RLModule(tiny_model(), **{"lr": 1e-3} | args)


def tiny_data(prompts: Any = None, reward: Any = reward_even, **args: Any) -> RolloutDataModule:
    small = {"group_size": 2, "prompts_per_step": 2, "max_completion_tokens": 3, "seed": 1}
    prompts = tiny_prompts(8) if prompts is None else prompts
    return RolloutDataModule(prompts, reward, **small | {"tokenizer": tiny_tokenizer()} | args)


def quiet_trainer(**args: Any) -> Trainer:
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "default_root_dir": tempfile.gettempdir(),  # not the repository
        "log_every_n_steps": 1,
    }
    return Trainer(**{"strategy": "colocated_hf", "accelerator": "cpu", "devices": 1} | quiet | args)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(p) for name, p in model.named_parameters()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class Steps(Callback):
    """What was trained on and logged, step by step, and what was validated."""

    def __init__(self) -> None:
        self.steps: list[StepBatch] = []
        self.logged: list[dict[str, float]] = []
        self.validated: list[RolloutBatch] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: StepBatch, batch_idx: int) -> None:
        self.steps.append(batch)
        self.logged.append({name: float(v) for name, v in trainer.callback_metrics.items()})

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        self.validated.append(batch)

    @property
    def trained(self) -> list[list[tuple[int, ...]]]:
        """Each step's prompts, once for each group."""
        return [list(dict.fromkeys(tuple(r.prompt_ids) for r in s.rollouts)) for s in self.steps]

    @property
    def sampled(self) -> list[list[tuple[int, ...]]]:
        return [[(*r.prompt_ids, -1, *r.completion_ids) for r in s.rollouts] for s in self.steps]


def fit(data: Any, module: Any = None, **args: Any) -> Steps:
    steps = Steps()
    quiet_trainer(callbacks=[steps], **args).fit(module or tiny_module(), data)
    return steps
