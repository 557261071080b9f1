"""Short runs of the whole straight line on a tiny model, and a witness of what its engine did."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from transformers import Qwen3ForCausalLM

from lightrl import RLModule, RolloutDataModule
from lightrl.datamodule import SizedLoader
from lightrl.types import Completion, Rollout, RolloutBatch, Sampling
from tests.conftest import destroy_process_group, distributed_environment, process_group_is_up, restore_environment
from tests.helpers import training
from tests.helpers.tiny import by_hand, tiny_prompts, tiny_tokenizer

BAR = 1e-4
"""Largest |difference| of logprobs between engine and trainer in float32."""


def quiet_trainer(strategy: Any = "colocated_vllm", **args: Any) -> Trainer:
    return training.quiet_trainer(strategy=strategy, **args)


def share_of_even_words(completion: str, ground_truth: Any) -> float:
    words = completion.split()
    return sum(int(w[1:]) % 2 == 0 for w in words if w[1:].isdigit()) / max(1, len(words))


def tiny_data(prompts: Any = None, **args: Any) -> RolloutDataModule:
    settings = {
        "reward": share_of_even_words,
        "group_size": 3,
        "prompts_per_step": 4,
        "max_completion_tokens": 6,
        "tokenizer": tiny_tokenizer(),
        "seed": 0,
    }
    return RolloutDataModule(tiny_prompts() if prompts is None else prompts, **{**settings, **args})


def whole_weights(module: Any) -> dict[str, torch.Tensor]:
    """The policy's parameters, unsharded copies (a collective)."""
    return training.weights(module.policy)


def plain_copy(module: Any) -> Qwen3ForCausalLM:
    """A model of its own with the policy's present weights (a collective)."""
    with torch.random.fork_rng():
        model = Qwen3ForCausalLM(module.policy.config)
    model.load_state_dict(whole_weights(module), strict=False)
    return model.eval()


def gap(model: Any, rollout: Rollout | Completion, temperature: float = 1.0, prompt: list[int] | None = None) -> float:
    """Largest |difference| between the sampler's logprobs and those of ``model``, computed by hand."""
    if isinstance(rollout, Completion):
        ids, found = rollout.token_ids, rollout.logprobs
    else:
        prompt, ids, found = rollout.prompt_ids, rollout.completion_ids, rollout.rollout_logprobs
    return float((by_hand(model, prompt, ids, temperature) - found).abs().max())


class Witness(Callback):
    """Keeps the policy of every push and compares what was sampled with it, and with the policy of the push before."""

    def __init__(self, temperature: float = 1.0) -> None:
        self.temperature = temperature
        self.synced: list[tuple[Trainer, Any, int, float]] = []
        self.policies: dict[int, Any] = {}
        self.versions: list[tuple[int, int]] = []
        """(policy version of the rollouts, optimizer steps done) of each training step."""
        self.gaps: list[float] = []
        self.stale_gaps: list[float] = []

    def on_weights_synced(self, trainer: Trainer, module: Any, policy_version: int, seconds: float) -> None:
        self.synced.append((trainer, module, policy_version, seconds))
        self.policies[policy_version] = plain_copy(module)

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self.versions.append((batch.policy_version, trainer.global_step))
        self._compare(batch)

    def on_validation_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        self._compare(batch)

    def on_predict_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        self._compare(batch)

    def _compare(self, batch: Any) -> None:
        seen = [v for v in self.policies if v < batch.policy_version]
        self.gaps.append(self._largest(batch, self.policies[batch.policy_version]))
        if seen:
            self.stale_gaps.append(self._largest(batch, self.policies[max(seen)]))

    def _largest(self, batch: Any, model: Any) -> float:
        return max(gap(model, r, self.temperature) for r in batch.rollouts)

    @property
    def pushes(self) -> list[int]:
        return [version for _, _, version, _ in self.synced]


def fit(
    model: Any,
    strategy: Any = "colocated_vllm",
    *,
    lr: float = 0.02,
    data: Any = None,
    callbacks: Any = (),
    **args: Any,
) -> tuple[RLModule, Trainer]:
    """Train ``model`` for a few steps."""
    module = RLModule(model, lr=lr)
    trainer = quiet_trainer(strategy, callbacks=list(callbacks), **args)
    trainer.fit(module, data or tiny_data())
    return module, trainer


@contextmanager
def cleaned_up() -> Iterator[None]:
    """What conftest does around each test, for fixtures that outlive one."""
    environment, group_was_up = distributed_environment(), process_group_is_up()
    yield
    if process_group_is_up() and not group_was_up:
        destroy_process_group()
    restore_environment(environment)


def with_engine(model: Any, body: Callable[[Any], None], strategy: Any = "colocated_vllm", **args: Any) -> None:
    """Call ``body(strategy)`` where rollouts are made: inside a validation run, with the engine up."""

    def item(_: int) -> RolloutBatch:
        body(trainer.strategy)
        return RolloutBatch([])

    trainer = quiet_trainer(strategy, **args)
    trainer.validate(RLModule(model), SizedLoader(1, item), verbose=False)


def sampling(**args: Any) -> Sampling:
    return Sampling(**{"max_completion_tokens": 6, "num_completions": 3, "stop_token_ids": (2,), **args})


def ids_of(groups: list[list[Completion]]) -> list[list[list[int]]]:
    return [[c.token_ids for c in group] for group in groups]
