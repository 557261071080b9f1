"""Strategies from a string, and what they refuse before any work is done."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.demos.boring_classes import BoringModel

import lightrl
from lightrl import RLModule
from lightrl.strategies import ColocatedHFStrategy, ColocatedVLLMStrategy
from tests.helpers.fits import quiet_trainer, tiny_data
from tests.helpers.tiny import tiny_model, tiny_prompts

ALLOWED = "32-true, bf16-true, bf16-mixed"


@pytest.mark.parametrize(
    ("name", "kind"), [("colocated_vllm", ColocatedVLLMStrategy), ("colocated_hf", ColocatedHFStrategy)]
)
def test_a_string_gives_the_strategy(name: str, kind: type) -> None:
    assert type(lightrl.Trainer(strategy=name, accelerator="cpu", devices=1, logger=False).strategy) is kind


def test_the_trainer_is_lightnings() -> None:
    assert lightrl.Trainer is pl.Trainer


@pytest.mark.parametrize("precision", ["16-true", "64-true"])
def test_unsupported_precision_is_refused_when_the_trainer_is_made(precision: str) -> None:
    with pytest.raises(ValueError, match=f"precision='{precision}' is not supported .*{ALLOWED}"):
        quiet_trainer("colocated_vllm", precision=precision)


def test_half_precision_on_a_cpu_is_what_lightning_makes_of_it() -> None:
    with pytest.warns(UserWarning, match="Using `precision='bf16-mixed'` instead"):
        assert quiet_trainer("colocated_vllm", precision="16-mixed").precision == "bf16-mixed"


def test_half_precision_elsewhere_is_refused() -> None:
    strategy = ColocatedVLLMStrategy()
    strategy.precision_plugin = SimpleNamespace(precision="16-mixed")  # what Lightning hands over on a GPU
    with pytest.raises(ValueError, match=f"'16-mixed' is not supported .*{ALLOWED}"):
        strategy._configure_launcher()


@pytest.mark.parametrize("precision", ALLOWED.split(", "))
def test_supported_precision_is_taken(precision: str) -> None:
    assert quiet_trainer("colocated_vllm", precision=precision).precision == precision


@pytest.mark.parametrize("lr", [1e-6, 9e-6])
def test_a_small_learning_rate_in_bfloat16_weights_is_refused(lr: float) -> None:
    trainer = quiet_trainer("colocated_hf", precision="bf16-true", max_steps=1)
    with pytest.raises(ValueError, match=f"lr={lr} .*bf16-mixed"):
        trainer.fit(RLModule("no/such/model", lr=lr), tiny_data())


@pytest.mark.parametrize(("precision", "lr"), [("bf16-true", 1e-5), ("bf16-mixed", 1e-6), ("bf16-true", 0.0)])
def test_other_learning_rates_are_taken(precision: str, lr: float) -> None:
    quiet_trainer("colocated_hf", precision=precision, max_steps=1).fit(RLModule(tiny_model(), lr=lr), tiny_data())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"sync_every": 0}, "sync_every=0 must be at least 1"),
        ({"sync_every": -1, "sleep": False}, "sync_every=-1 must be at least 1"),
        ({"sync_every": 2, "sleep": True}, "sync_every=2 .*leave sleep out"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0 must be at least 1"),
        ({"tensor_parallel_size": 1.5}, "tensor_parallel_size=1.5 must be a whole number"),
        ({"sync_every": "2"}, "sync_every='2' must be a whole number"),
    ],
)
def test_bad_arguments_are_refused(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ColocatedVLLMStrategy(**args)


@pytest.mark.parametrize("verb", ["fit", "validate", "predict"])
def test_what_is_no_checkpoint_is_refused(verb: str, tmp_path: Path) -> None:
    path = tmp_path / "notes.md"
    path.write_text("not a checkpoint")
    data = tiny_data(val_prompts=tiny_prompts(2))
    with pytest.raises(ValueError, match=r"notes.md is no checkpoint, or not all of one"):
        getattr(quiet_trainer("colocated_hf"), verb)(RLModule(tiny_model()), data, ckpt_path=path)


@pytest.mark.parametrize(("devices", "size"), [(1, 2), (2, 4), (4, 3)])
def test_devices_have_to_divide_into_tensor_parallel_groups(devices: int, size: int) -> None:
    strategy = ColocatedVLLMStrategy(tensor_parallel_size=size)
    with pytest.raises(ValueError, match=f"{devices} devices do not divide .*tensor_parallel_size={size}"):
        quiet_trainer(strategy, devices=devices)


def test_colocated_hf_has_no_tensor_parallelism() -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size=2: colocated_hf"):
        quiet_trainer(ColocatedHFStrategy(tensor_parallel_size=2), devices=2)


@pytest.mark.parametrize("strategy", ["auto", "ddp"])
def test_a_strategy_that_cannot_generate_is_refused(strategy: str) -> None:
    trainer = quiet_trainer(strategy, max_steps=1)
    with pytest.raises(ValueError, match="'colocated_vllm'.*'colocated_hf'"):
        trainer.fit(RLModule(tiny_model()), tiny_data())


def test_a_module_of_another_kind_is_refused() -> None:
    trainer = quiet_trainer("colocated_hf", max_steps=1)
    with pytest.raises(ValueError, match=r"BoringModel has no `policy`.*RLModule"):
        trainer.fit(BoringModel())


@pytest.mark.slow
def test_importing_lightrl_is_light_and_a_missing_vllm_is_said_at_once() -> None:
    program = (
        "import sys, lightrl; before = list(sys.modules); import tests.strategies.test_registry as t; t.main(before)"
    )
    command = [sys.executable, "-c", program]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout.splitlines()
    assert said[0] == "imported too: []"
    assert said[1] == "loaded: []"
    for part in ("vLLM", "not installed", "lightrl-trainer[vllm]", "lightrl-trainer[cpu]", "colocated_hf"):
        assert part in said[2]


def main(before: list[str]) -> None:
    """In a process where nothing but lightrl has been imported, and where vLLM cannot be."""
    # torchmetrics brings transformers' list of models by itself, though no model.
    heavy = re.compile(r"(vllm|ray|datasets)$|transformers\.models\..*\.modeling_(?!auto$)")
    print("imported too:", [name for name in before if heavy.match(name)])
    sys.modules["vllm"] = None  # type: ignore[assignment]
    loaded: list[Any] = []
    RLModule._load = lambda self: loaded.append(self.model)  # type: ignore[assignment, return-value]
    trainer = quiet_trainer("colocated_vllm", max_steps=1)
    try:
        trainer.fit(RLModule("no/such/model"), tiny_data(str(Path("no/such/file.parquet"))))
    except ValueError as error:
        print("loaded:", loaded)
        print(" ".join(str(error).split()))
