"""Optimizers by name: what each is, and that those which keep their state elsewhere make the same steps."""

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger

from lightrl.engines.vllm import _config_folder
from lightrl.optim import OPTIMIZERS, make_optimizer, on_local_tensors, schedule_factor
from lightrl.quantized import import_bitsandbytes
from tests.helpers.tiny import tiny_model, tiny_prompts
from tests.helpers.training import equal, quiet_trainer, tiny_data, tiny_module, weights


def after_steps(make: Any) -> tuple[dict[str, torch.Tensor], Any]:
    model = tiny_model()
    optimizer = make(model)
    for step in range(3):
        for i, p in enumerate(model.parameters()):
            p.grad = torch.full_like(p, 0.1 * (i + 1) * (-1) ** step) + p.detach()
        optimizer.step()
    return weights(model), optimizer


def test_offloaded_adamw_makes_adamws_steps() -> None:
    def make(name: str) -> Any:
        lots = lambda m: [(list(m.parameters())[:3], 1e-3), (list(m.parameters())[3:], 1e-2)]  # noqa: E731
        return lambda m: make_optimizer(lots(m), betas=(0.9, 0.99), weight_decay=0.1, name=name)

    right, plain = after_steps(make("adamw"))
    found, offloaded = after_steps(make("adamw_offload"))
    assert equal(found, right)
    assert len(offloaded.param_groups) == len(plain.param_groups) == 3
    assert len(offloaded.state) == len(plain.state) == len(right)
    assert offloaded.state_dict()["state"].keys() == plain.state_dict()["state"].keys()


@pytest.mark.gpu
def test_offloaded_state_is_in_cpu_memory_between_steps() -> None:
    model = tiny_model().cuda()
    optimizer = make_optimizer([(model.parameters(), 1e-2)], betas=(0.9, 0.99), weight_decay=0.0, name="adamw_offload")
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    state = [v for s in optimizer.state.values() for v in s.values() if v.ndim]
    assert len(state) == 2 * len(list(model.parameters()))
    assert {v.device.type for v in state} == {"cpu"}
    again = make_optimizer([(model.parameters(), 1e-2)], betas=(0.9, 0.99), weight_decay=0.0, name="adamw_offload")
    again.load_state_dict(optimizer.state_dict())
    assert {v.device.type for s in again.state.values() for v in s.values() if v.ndim} == {"cpu"}


def test_loaded_state_goes_to_cpu_memory_too(monkeypatch: pytest.MonkeyPatch) -> None:
    _, optimizer = after_steps(
        lambda m: make_optimizer([(m.parameters(), 1e-3)], betas=(0.9, 0.99), weight_decay=0.0, name="adamw_offload")
    )
    moved: list[torch.device] = []
    monkeypatch.setattr(type(optimizer), "_move", lambda self, parameter, device: moved.append(device))
    optimizer.load_state_dict(optimizer.state_dict())
    assert moved == [torch.device("cpu")] * len(optimizer.state)


class RefusesShards(torch.optim.AdamW):
    """Stands for kernels that take the memory of a tensor for the whole of it."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                assert type(p) in (torch.Tensor, torch.nn.Parameter), type(p)
                assert p.grad is None or type(p.grad) is torch.Tensor
        return super().step()


def test_an_optimizer_that_knows_no_shards_steps_on_this_ranks_part(tmp_path: Any) -> None:
    def fit(kind: Any) -> tuple[dict[str, torch.Tensor], Any]:
        class Module(type(tiny_module())):  # type: ignore[misc]
            def configure_optimizers(self) -> Any:
                return kind(self.policy.parameters(), lr=1e-2)

        module = Module(tiny_model())
        trainer = quiet_trainer(max_steps=3, gradient_clip_val=1.0)
        trainer.fit(module, tiny_data())
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        return weights(module.policy), torch.load(tmp_path / "last.ckpt")["optimizer_states"][0]["state"]

    with pytest.raises(AssertionError, match="DTensor"):
        fit(RefusesShards)
    right, saved = fit(torch.optim.AdamW)
    found, also_saved = fit(on_local_tensors(RefusesShards))
    assert equal(found, right)
    assert saved.keys() == also_saved.keys()
    assert all(torch.equal(saved[n]["exp_avg"], also_saved[n]["exp_avg"]) for n in saved)


@pytest.mark.parametrize("name", [n for n, choice in OPTIMIZERS.items() if choice.needs_bitsandbytes])
def test_without_bitsandbytes_one_clear_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ValueError, match=f"optimizer='{name}' needs bitsandbytes, which is not installed here"):
        tiny_module(optimizer=name)


def test_without_a_gpu_bitsandbytes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", torch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="quantize='4bit' needs a CUDA device"):
        import_bitsandbytes("quantize='4bit'")


def test_a_quantised_base_without_the_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ValueError, match="quantize='4bit' needs bitsandbytes, which is not installed here"):
        tiny_module(quantize="4bit", lora={})


def test_the_engine_of_a_quantised_base_is_a_plain_one(tmp_path: Path) -> None:
    policy = tiny_model()
    policy.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    _config_folder(policy, tmp_path, trust_remote_code=False)
    written = json.loads((tmp_path / "config.json").read_text())
    assert "quantization_config" not in written
    assert written["hidden_size"] == policy.config.hidden_size


def test_nothing_to_train_is_refused() -> None:
    model = tiny_model().requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter is trained"):
        make_optimizer([(model.parameters(), 1e-2)], betas=(0.9, 0.99), weight_decay=0.0)


@pytest.mark.parametrize(
    ("schedule", "warmup_steps", "factors"),
    [
        ("constant", 0, [1, 1, 1, 1, 1, 1, 1]),
        ("constant", 3, [1 / 3, 2 / 3, 1, 1, 1, 1, 1]),
        ("linear", 0, [1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0]),
        ("linear", 2, [0.5, 1, 1, 0.75, 0.5, 0.25, 0]),
        ("cosine", 2, [0.5, 1, 1, 0.853553, 0.5, 0.146447, 0]),
    ],
)
def test_schedules(schedule: str, warmup_steps: int, factors: list[float]) -> None:
    factor = schedule_factor(schedule, warmup_steps, None if schedule == "constant" else 6)
    assert [factor(step) for step in range(7)] == pytest.approx(factors, abs=1e-6)


@pytest.mark.parametrize(
    ("arguments", "length", "factors"),
    [
        ({}, {"max_steps": 2}, [1, 1]),
        ({"warmup_steps": 2}, {"max_steps": 3}, [0.5, 1, 1]),
        ({"schedule": "linear"}, {"max_epochs": 2}, [1, 0.75, 0.5, 0.25]),  # 2 steps an epoch
    ],
    ids=str,
)
def test_the_learning_rate_of_each_optimizer_step(
    arguments: dict[str, Any], length: dict[str, int], factors: list[float], tmp_path: Path
) -> None:
    class Rates(LearningRateMonitor):
        used: list[float] = []

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            self.used.append(optimizer.param_groups[0]["lr"])

    rates, logger = Rates(logging_interval="step"), CSVLogger(tmp_path)
    rates.used = []
    module = tiny_module(lr=2e-3, **arguments)
    quiet_trainer(callbacks=[rates], logger=logger, **length).fit(
        module, tiny_data(tiny_prompts(4), max_completion_tokens=1)
    )
    assert rates.used == pytest.approx([2e-3 * f for f in factors])
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        logged = [float(v) for row in csv.DictReader(file) for k, v in row.items() if k == "lr-AdamW/pg1" and v]
    assert logged == pytest.approx(rates.used)


def test_schedules_that_end_need_an_end() -> None:
    with pytest.raises(ValueError, match="schedule='cosine' needs to know the run's length"):
        schedule_factor("cosine", 0, float("inf"))
    assert schedule_factor("linear", 0, 4)(9) == 0.0


def test_weight_decay_leaves_vectors_alone() -> None:
    module = tiny_module(weight_decay=0.1)
    module.configure_model()
    groups = module.configure_optimizers().param_groups
    assert [g["weight_decay"] for g in groups] == [0.1, 0.0]
    assert {p.ndim for p in groups[0]["params"]} == {2}
    assert {p.ndim for p in groups[1]["params"]} == {1}
