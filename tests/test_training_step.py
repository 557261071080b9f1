"""One training step against a loop in plain PyTorch, however the step is cut and sharded."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LambdaCallback
from torch.distributed.tensor import DTensor

from lightrl import RLModule
from lightrl.datamodule import SizedLoader
from lightrl.distributed import rank, world_size
from lightrl.packing import StepBatch, live_tokens
from lightrl.strategies import ColocatedHFStrategy
from tests.helpers.tiny import random_rollouts, tiny_model

LR, CLIP, STEPS, ROLLOUTS = 0.5, 0.1, 3, 12
MEMBERS = 3
BAR = 1e-6


def rollouts_of_step(step: int) -> list[Any]:
    return random_rollouts(ROLLOUTS, seed=step, model=tiny_model(), members=MEMBERS)


def plain_loop(aggregation: str = "token") -> dict[str, torch.Tensor]:
    """GRPO's clipped loss, gradient clipping and SGD, rollout by rollout, without anything of lightrl's."""
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(STEPS):
        rollouts = rollouts_of_step(step)
        total = sum(len(r.completion_ids) for r in rollouts)
        loss = torch.zeros(())
        for r in rollouts:
            ids = torch.tensor([r.prompt_ids + r.completion_ids])
            logits = model(ids).logits[0, len(r.prompt_ids) - 1 : -1]
            logprobs = logits.log_softmax(-1).gather(1, torch.tensor(r.completion_ids)[:, None])[:, 0]
            ratio = (logprobs - r.old_logprobs).exp()
            surrogate = torch.minimum(ratio * r.advantage, ratio.clamp(0.8, 1.2) * r.advantage)
            size = {"token": total, "sequence": ROLLOUTS * len(r.completion_ids), "constant": ROLLOUTS * 100}[
                aggregation
            ]
            loss = loss - surrogate.sum() / size
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


class SGDModule(RLModule):
    """Adam divides by the gradient's size and so shows rounding where the gradient is nearly nothing."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.policy.parameters(), lr=LR)


def step_batch(module: RLModule, rollouts: list[Any], cuts: int) -> StepBatch:
    denominator = module.denominator(live_tokens(rollouts), len(rollouts), 100)
    own = rollouts[rank() :: world_size()]
    packer = module.policy_forward.packer(module.policy)
    micro = [packer.pack(p, temperature=1.0, denominator=denominator) for p in packer.split(own, cuts)]
    return StepBatch(micro, policy_version=0)


def train(
    strategy: Any,
    cuts: list[int],
    aggregation: str = "token",
    devices: int = 1,
    callbacks: list[Any] | None = None,
    **module_args: Any,
) -> dict[str, Any]:
    """Run the same steps with lightrl: ``cuts[i]`` micro-batches in step i."""
    module = SGDModule(tiny_model(), aggregation=aggregation, **module_args)
    fit(module, strategy, cuts, devices, callbacks)
    return weights_of(module)


def fit(module: RLModule, strategy: Any, cuts: list[int], devices: int = 1, callbacks: list[Any] | None = None) -> None:
    loader = SizedLoader(STEPS, lambda i: step_batch(module, rollouts_of_step(i), cuts[i % len(cuts)]))
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=devices,
        max_steps=STEPS,
        gradient_clip_val=CLIP,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader)


def weights_of(module: RLModule) -> dict[str, Any]:
    trained = {name: p.detach() for name, p in module.policy.named_parameters()}
    return {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in trained.items()}


def relative_error(found: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    error = sum(float((found[n] - right[n]).double().pow(2).sum()) for n in right) ** 0.5
    return error / sum(float(right[n].double().pow(2).sum()) for n in right) ** 0.5


def test_clipping_and_the_steps_themselves_matter() -> None:
    start = {name: p.detach() for name, p in tiny_model().named_parameters()}
    assert relative_error(start, plain_loop()) > 1000 * BAR


def sharded(**args: Any) -> ColocatedHFStrategy:
    return ColocatedHFStrategy(**args)


STRATEGIES = {
    "plain device": lambda: "auto",
    "FSDP2": lambda: sharded(),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("cuts", [[1], [4], [3, 1, 5]], ids=str)
def test_step_equals_plain_loop(strategy: str, cuts: list[int]) -> None:
    assert relative_error(train(STRATEGIES[strategy](), cuts), plain_loop()) < BAR


@pytest.mark.parametrize("aggregation", ["sequence", "constant"])
def test_step_equals_plain_loop_for_each_aggregation(aggregation: str) -> None:
    assert relative_error(train("auto", [3], aggregation), plain_loop(aggregation)) < BAR


@pytest.mark.parametrize("args", [{"packed": False}, {"share_prefix": False}], ids=str)
def test_padded_rows_and_prompts_that_are_not_shared_give_the_same_step(args: dict[str, bool]) -> None:
    assert relative_error(train("auto", [2], **args), plain_loop()) < BAR


def test_these_steps_do_share_prompts() -> None:
    module = RLModule(tiny_model())
    module.configure_model()
    shared = step_batch(module, rollouts_of_step(0), 2).micro
    assert sum(len(m.input_ids) for m in shared) < sum(m.num_tokens for m in shared)


def test_wiping_gradients_where_lightning_does_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RLModule, "optimizer_zero_grad", lambda self, e, b, optimizer: optimizer.zero_grad())
    assert relative_error(train("auto", [4]), plain_loop()) > 100 * BAR


class Broken(SGDModule):
    """Raises at the start or at the third micro-batch, once."""

    def __init__(self, place: str) -> None:
        super().__init__(tiny_model())
        self.place, self.left = place, 3

    def configure_model(self) -> None:
        super().configure_model()
        self.policy.model.layers[1].mlp.register_forward_hook(self._break)

    def on_train_start(self) -> None:
        if self.left == 3 and self.place == "start":
            self.left = 0
            self._raise()

    def _break(self, mlp: Any, inputs: Any, output: torch.Tensor) -> None:
        self.left -= 1
        if self.left == 0 and self.place == "forward":
            self._raise()
        if self.left == 0 and self.place == "backward":
            output.register_hook(self._raise)

    def loss(self, batch: Any, logprobs: torch.Tensor) -> Any:
        if self.left == 0 and self.place == "loss":
            self.left -= 1
            self._raise()
        return super().loss(batch, logprobs)

    def _raise(self, *_: Any) -> None:
        raise RuntimeError(f"broken in the {self.place}")


def fit_broken(module: Broken, strategy: Any, devices: int = 1) -> None:
    with pytest.raises(RuntimeError, match="broken in the"):
        fit(module, strategy, [4], devices)


@pytest.mark.parametrize("place", ["start", "loss", "forward", "backward"])
def test_a_step_that_broke_off_leaves_nothing_for_the_next_fit(place: str) -> None:
    module = Broken(place)
    fit_broken(module, sharded())
    assert all(isinstance(p, DTensor) for p in module.policy.parameters()), "gathered layers take memory"
    fit(module, sharded(), [3, 1, 4])
    assert relative_error(weights_of(module), plain_loop()) < BAR


TIGHT = {"defer_grad_sync": False, "reshard_after_forward": True}
CUTS_OF_TWO_RANKS = [3, 1, 4]
LAYERS = 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "gathers", "reductions"),
    [
        (TIGHT, 1 + 2 * LAYERS, 1 + LAYERS),  # the root and each layer, layers once more in the backward
        (TIGHT | {"defer_grad_sync": True}, 1 + 2 * LAYERS, 0),
        ({}, 0, 0),
    ],
    ids=["each micro-batch", "deferred", "where there is room"],
)
def test_two_ranks_give_the_same_step(args: dict[str, bool], gathers: int, reductions: int, tmp_path: Path) -> None:
    out = tmp_path / "trained.pt"
    subprocess.run(
        [sys.executable, "-m", "tests.test_training_step", str(out), json.dumps(args)], check=True, timeout=240
    )
    found = torch.load(out)
    assert relative_error(found["weights"], plain_loop()) < BAR
    _, one, four = found["counts"]  # of steps of 3, 1 and 4 micro-batches
    assert [b - a for a, b in zip(one, four, strict=True)] == [3 * gathers, 3 * reductions]


@pytest.mark.slow
def test_another_fit_of_two_ranks_does_as_its_own_strategy_says(tmp_path: Path) -> None:
    out = tmp_path / "trained.pt"
    command = [sys.executable, "-m", "tests.test_training_step", str(out), json.dumps(TIGHT), "after a broken one"]
    subprocess.run(command, check=True, timeout=240)
    found = torch.load(out)
    assert relative_error(found["weights"], plain_loop()) < BAR
    _, one, four = found["counts"]
    assert [b - a for a, b in zip(one, four, strict=True)] == [3 * (1 + 2 * LAYERS), 3 * (1 + LAYERS)]


class Counts:
    """Of gatherings and reductions, at the end of each step."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []
        self._now = [0, 0]
        names = ("all_gather_single", "reduce_scatter_single")
        if not hasattr(dist, names[0]):  # as they were called
            names = ("all_gather_into_tensor", "reduce_scatter_tensor")
        for i, name in enumerate(names):
            setattr(dist, name, self._counting(i, getattr(dist, name)))

    def _counting(self, i: int, collective: Any) -> Any:
        def counted(*args: Any, **how: Any) -> Any:
            self._now[i] += 1
            return collective(*args, **how)

        return counted

    def note(self) -> None:
        self.steps.append(self._now)
        self._now = [0, 0]


def on_two_ranks(out: str, args: str, before: str = "") -> None:
    counts = Counts()
    noted = LambdaCallback(on_train_batch_end=lambda *_: counts.note())
    module = SGDModule(tiny_model())
    if before:
        module = Broken("loss")
        fit_broken(module, sharded(), devices=2)
    fit(module, sharded(**json.loads(args)), CUTS_OF_TWO_RANKS, 2, [noted])
    weights = weights_of(module)
    if rank() == 0:
        torch.save({"weights": weights, "counts": counts.steps}, out)


if __name__ == "__main__":
    on_two_ranks(*sys.argv[1:])
