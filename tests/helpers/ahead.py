"""What engines of their own did beside training: what was trained on, by which policies, and how to disturb it."""

import time
from collections import Counter
from typing import Any

from lightning.pytorch import Callback

from lightrl.strategies import AsyncVLLMStrategy
from tests.helpers.fits import plain_copy
from tests.helpers.tiny import by_hand


class Record(Callback):
    """What each step trained on and when, and the policy of every push."""

    def __init__(self, step_seconds: float = 0.0) -> None:
        self.step_seconds = step_seconds
        self.rollouts: list[list[Any]] = []
        self.ages: list[int] = []
        self.losses: list[float] = []
        self.policies: dict[int, Any] = {}
        self.validated = 0

    def on_weights_synced(self, trainer: Any, module: Any, policy_version: int, seconds: float) -> None:
        self.policies[policy_version] = plain_copy(module)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.rollouts.append(batch.rollouts)
        self.ages += [trainer.global_step - int(r.policy_versions.min()) for r in batch.rollouts]
        time.sleep(self.step_seconds)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["train/loss"]))

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        self.validated += len(batch)
        assert batch.policy_version == trainer.global_step

    @property
    def prompts(self) -> Counter[tuple[int, ...]]:
        """How many groups of each prompt were trained on."""
        groups = {(step, tuple(r.prompt_ids), r.group_id) for step, rs in enumerate(self.rollouts) for r in rs}
        return Counter(prompt for _, prompt, _ in groups)

    def gaps(self, policies: dict[int, Any] | None = None) -> list[float]:
        """Largest |difference| of each rollout's logprobs to those of the policies that its tokens say they are of."""
        found = []
        for r in (r for rs in self.rollouts for r in rs):
            for version in r.policy_versions.unique().tolist():
                right = by_hand((policies or self.policies)[version], r.prompt_ids, r.completion_ids)
                of_version = (r.policy_versions == version) & (True if r.loss_mask is None else r.loss_mask)
                found.append(float((right - r.rollout_logprobs)[of_version].abs().max()))
        return found


def processes_of(strategy: AsyncVLLMStrategy) -> dict[int, Any]:
    assert strategy._pool is not None
    return strategy._pool.launcher.processes  # type: ignore[attr-defined]


class AtStep(Callback):
    """Does something at the start of one training step."""

    def __init__(self, step: int, act: Any) -> None:
        self.step, self.act = step, act

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            self.act(trainer)
