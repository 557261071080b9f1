"""Truncated completions left out (B07), and the entropy bonus."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

from lightrl import RLModule
from lightrl.balance import Packer
from lightrl.datamodule import SizedLoader
from lightrl.losses import Terms
from lightrl.packing import MicroBatch, StepBatch, idle_rollout, pack
from tests.helpers.tiny import random_rollouts, tiny_model, tiny_prompts
from tests.helpers.training import Steps, equal, quiet_trainer, tiny_data, tiny_module, weights

pytestmark = pytest.mark.slow


class OneForEachToken(RLModule):
    def policy_terms(self, batch: MicroBatch, logprobs: Tensor, old: Tensor) -> Terms:
        return logprobs * 0 + 1.0, {}


@pytest.mark.parametrize("mask_truncated", [True, False])
@pytest.mark.parametrize(("aggregation", "right"), [("token", 1.0), ("sequence", 1.0), ("constant", None)])
def test_b07_truncated_completions_leave_both_sides_of_the_line(
    mask_truncated: bool, aggregation: str, right: float | None
) -> None:
    """With a loss of 1 for each token the mean is 1: truncated tokens below the line only would make it less."""
    seen = Steps()
    module = OneForEachToken(tiny_model(), lr=1e-3, mask_truncated=mask_truncated, aggregation=aggregation)
    data = tiny_data(tiny_prompts(24), group_size=8, prompts_per_step=8, max_completion_tokens=8)
    quiet_trainer(max_steps=1, callbacks=[seen]).fit(module, data)
    (step,), (logged,) = seen.steps, seen.logged
    assert 0 < logged["rollout/truncated_frac"] < 1
    assert any(r.truncated for r in step.rollouts) != mask_truncated
    assert (len(step.rollouts) == 64) != mask_truncated
    lengths = [len(r.completion_ids) for r in step.rollouts]
    expected = sum(lengths) / (len(lengths) * 8) if right is None else right
    assert logged["train/loss"] == pytest.approx(expected, rel=1e-6)


def test_b07_truncated_completions_still_count_in_their_groups_baseline() -> None:
    seen, data = Steps(), tiny_data(tiny_prompts(24), group_size=8, prompts_per_step=8, max_completion_tokens=8)
    quiet_trainer(max_steps=1, callbacks=[seen]).fit(tiny_module(mask_truncated=True), data)
    all_of_them = Steps()
    data = tiny_data(tiny_prompts(24), group_size=8, prompts_per_step=8, max_completion_tokens=8)
    quiet_trainer(max_steps=1, callbacks=[all_of_them]).fit(tiny_module(), data)
    kept = [(r.token_ids.tolist(), r.advantage) for r in seen.steps[0].rollouts]
    assert kept == [(r.token_ids.tolist(), r.advantage) for r in all_of_them.steps[0].rollouts if not r.truncated]


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_b07_nothing_but_truncated_completions_is_logged_as_nothing(aggregation: str) -> None:
    seen, module = Steps(), tiny_module(mask_truncated=True, aggregation=aggregation)
    quiet_trainer(max_steps=1, callbacks=[seen], gradient_clip_val=1.0).fit(module, tiny_data(max_completion_tokens=1))
    (step,), (logged,) = seen.steps, seen.logged
    assert logged["rollout/truncated_frac"] == 1
    assert step.rollouts == []
    assert logged["train/loss"] == logged["train/grad_norm"] == 0.0
    assert all(value == value for value in logged.values())


class Weights(Callback):
    """The weights, and AdamW's state of one parameter, after each step."""

    def __init__(self) -> None:
        self.found: list[dict[str, Tensor]] = []
        self.steps_done: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.found.append(weights(pl_module.policy))
        self.steps_done.append(float(next(iter(trainer.optimizers[0].state.values()))["step"]))


@pytest.mark.parametrize("strategy", ["auto", "colocated_hf"])
def test_b07_a_step_of_nothing_leaves_the_weights_to_neither_momentum_nor_decay(strategy: str) -> None:
    rollouts, seen = random_rollouts(4), Weights()
    good = StepBatch([pack(rollouts, temperature=1.0, denominator=9.0)], 0, rollouts)
    nothing = StepBatch([pack([idle_rollout()], temperature=1.0)] * 2, 0, [])
    steps = [good, nothing, good]
    trainer = quiet_trainer(strategy=strategy, max_steps=3, callbacks=[seen], gradient_clip_val=1.0)
    trainer.fit(tiny_module(weight_decay=0.1), SizedLoader(3, lambda i: steps[i]))
    first, second, third = seen.found
    assert equal(first, second)
    assert not equal(second, third)
    assert seen.steps_done == [1, 1, 2]
    assert trainer.global_step == 3


class SGDModule(RLModule):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.policy.parameters(), lr=0.5)


@pytest.mark.parametrize("strategy", ["auto", "colocated_hf"])
@pytest.mark.parametrize("cuts", [1, 3])
@pytest.mark.parametrize("packed", [True, False])
def test_the_entropy_bonus_is_the_gradient_of_the_mean_entropy(strategy: str, cuts: int, packed: bool) -> None:
    rollouts = random_rollouts(6)
    total = float(sum(len(r.completion_ids) for r in rollouts))
    micro = [pack(p, temperature=1.0, denominator=total) for p in Packer().split(rollouts, cuts)]
    module, seen = SGDModule(tiny_model(), entropy_coef=0.3, packed=packed), Steps()
    loader = SizedLoader(1, lambda _: StepBatch(micro, 0, rollouts))
    quiet_trainer(strategy=strategy, max_steps=1, callbacks=[seen]).fit(module, loader)

    model, loss, entropies = tiny_model(), torch.zeros(()), torch.zeros(())
    for r in rollouts:
        rows = model(r.token_ids[None]).logits[0, len(r.prompt_ids) - 1 : -1].log_softmax(-1)
        entropies = entropies - (rows.exp() * rows).sum()
        loss = loss - r.advantage * rows.gather(1, torch.tensor(r.completion_ids)[:, None]).sum()
    right = (loss - 0.3 * entropies) / total
    right.backward()
    for (name, p), found in zip(model.named_parameters(), weights(module.policy).values(), strict=True):
        assert (found - (p - 0.5 * p.grad)).abs().max() < 1e-6, name  # type: ignore[operator]
    # At a ratio of 1 the surrogate's value is -A, not -A log pi.
    value = (
        -sum(r.advantage * len(r.completion_ids) for r in rollouts) / total - 0.3 * float(entropies.detach()) / total
    )
    assert seen.logged[0]["train/loss"] == pytest.approx(value, rel=1e-5)
    assert seen.logged[0]["train/entropy"] == pytest.approx(float(entropies.detach()) / total, rel=1e-5)


class Ratios(RLModule):
    gaps: dict[int, list[float]]

    def policy_terms(self, batch: MicroBatch, logprobs: Tensor, old: Tensor) -> Terms:
        self.gaps.setdefault(self.global_step, []).append(float((logprobs.detach() - old).abs().max()))
        return super().policy_terms(batch, logprobs, old)


@pytest.mark.parametrize("reuse", [{"minibatches_per_rollout": 2}, {"epochs_per_rollout": 2}])
def test_b13_the_first_of_several_updates_has_ratios_of_exactly_one_in_bfloat16(reuse: dict[str, int]) -> None:
    """Its micro-batches are others than those that the rollouts were scored in, and bfloat16 rounds differently."""
    module = Ratios(tiny_model().to(torch.bfloat16), lr=1e-2)
    module.gaps = {}
    data = tiny_data(group_size=8, max_completion_tokens=20, max_tokens_per_micro_batch=64, **reuse)
    quiet_trainer(max_steps=4, precision="bf16-true").fit(module, data)
    assert {step: max(gaps) > 0 for step, gaps in module.gaps.items()} == {0: False, 1: True, 2: False, 3: True}
