"""The memory estimate against what a run allocates, and by hand."""

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback

from lightrl import RLModule
from lightrl.algorithms import PPO
from lightrl.memory import MemoryPlan, Row, estimate_memory, model_size
from lightrl.sharding import local_tensor
from tests.helpers.fits import with_engine
from tests.helpers.tiny import tiny_model
from tests.helpers.training import quiet_trainer, tiny_data

LORA = {"r": 4}


def allocated(tensors: Any) -> int:
    return sum(local_tensor(t).numel() * t.element_size() for t in tensors)


RUNS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "all": (RLModule, {}, "32-true"),
    "bf16-mixed, reference": (RLModule, {"kl_coef": 0.1}, "bf16-mixed"),
    "LoRA": (RLModule, {"lora": LORA, "kl_coef": 0.1}, "bf16-mixed"),
    "LoRA, bf16": (RLModule, {"lora": LORA}, "bf16-true"),
    "partial": (RLModule, {"trainable": ["norm", "layers.1"]}, "bf16-mixed"),
    "critic": (PPO, {"critic": "own"}, "32-true"),
}


@pytest.mark.parametrize("name", RUNS)
def test_weights_gradients_and_optimizer_are_what_a_run_allocates(name: str) -> None:
    kind, args, precision = RUNS[name]
    module = kind(tiny_model(), lr=1e-3, **args)
    gathered: list[int] = []
    seen = LambdaCallback(on_before_backward=lambda *_: gathered.append(allocated(module.policy.parameters())))
    trainer = quiet_trainer(max_steps=1, precision=precision, callbacks=[seen])
    trainer.fit(module, tiny_data())
    size = model_size(tiny_model().config, lora=args.get("lora"), trainable=args.get("trainable"))
    copied, own = module.reference is not None, args.get("critic") == "own"
    plan = estimate_memory(size, precision=precision, reference=copied, own_critic=own)
    rows = {r.name: r.bytes for r in plan.rows}
    parameters = list(module.parameters())
    trained = [p for p in parameters if p.requires_grad]
    head = 129 if own else 0  # a critic's head, which the estimate leaves out
    weight = trained[0].element_size()
    assert rows["weights, trained"] == allocated(trained) - head * weight
    assert rows.get("weights, frozen", 0) == allocated(p for p in parameters if not p.requires_grad)
    assert [rows["all layers, gathered"]] == gathered
    assert rows["gradients"] == allocated(p.grad for p in trained if p.grad is not None) - head * weight
    state = [v for s in trainer.optimizers[0].state.values() for v in s.values() if v.ndim]
    assert rows["optimizer state"] == allocated(state) - 2 * head * weight
    assert rows.get("reference", 0) == (allocated(module.reference.parameters()) if copied else 0)


@pytest.mark.vllm
def test_the_cache_holds_as_many_tokens_as_the_engine_says() -> None:
    def body(strategy: Any) -> None:
        config = strategy._engine.llm.llm_engine.vllm_config.cache_config
        found.append((config.num_gpu_blocks * config.block_size, config.kv_cache_memory_bytes))

    found: list[tuple[int, int]] = []
    with_engine(tiny_model(), body)
    ((tokens, held),) = found
    plan = estimate_memory(model_size(tiny_model().config), precision="32-true", cached_tokens=tokens)
    (cache,) = (r.bytes for r in plan.rows if r.name == "engine cache")
    assert cache == pytest.approx(held, rel=0.01)


def test_what_shares_memory_over_devices_and_what_does_not() -> None:
    size = model_size(tiny_model().config)
    two, four = (
        {r.name: r.bytes for r in estimate_memory(size, devices=n, tensor_parallel_size=n, reference=True).rows}
        for n in (2, 4)
    )
    shared = {"weights, trained", "reference", "gradients", "optimizer state", "engine weights"}
    assert {name for name in two if four[name] == two[name] / 2} == shared  # with one key head the cache is on all
    assert {name for name in two if four[name] == two[name]} == set(two) - shared


def test_options_that_save_memory_do() -> None:
    size, lora = model_size(tiny_model().config), model_size(tiny_model().config, lora=LORA)
    plain = estimate_memory(size)
    assert estimate_memory(lora).training < plain.training
    assert estimate_memory(lora, quantize="4bit").training < estimate_memory(lora).training
    assert estimate_memory(size, optimizer="adamw_8bit").training < plain.training
    assert estimate_memory(size, optimizer="adamw_offload").training < plain.training
    assert estimate_memory(size, gradient_checkpointing=True).training < plain.training
    shared = estimate_memory(size, devices=2)
    assert estimate_memory(size, devices=2, keeps_layers=True).training > shared.training
    assert estimate_memory(size, sleep=False).training > plain.training
    assert estimate_memory(size, offload_optimizer=False).rollouts > plain.rollouts


def test_the_table() -> None:
    plan = MemoryPlan(
        (Row("weights", 2 * 2**30), Row("state", 2**30, samples=False), Row("cache", 2**32, trains=False))
    )
    assert (plan.training, plan.rollouts, plan.peak) == (3 * 2**30, 6 * 2**30, 6 * 2**30)
    assert [line.split() for line in plan.table().splitlines()] == [
        ["GiB", "on", "each", "device", "training", "rollouts"],
        ["weights", "2.00", "2.00"],
        ["state", "1.00", "-"],
        ["cache", "-", "4.00"],
        ["sum", "3.00", "6.00"],
    ]


@pytest.mark.parametrize(
    "wrong", [{"precision": "16"}, {"optimizer": "sgd"}, {"devices": 0}, {"cached_tokens": 0}], ids=str
)
def test_bad_input_is_named(wrong: dict[str, Any]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"{name}={value!r}"):
        estimate_memory(model_size(tiny_model().config), **wrong)


def test_the_size_allocates_nothing_and_leaves_random_state_alone() -> None:
    before = torch.get_rng_state()
    size = model_size(tiny_model().config, lora=LORA)
    assert torch.equal(before, torch.get_rng_state())
    model = tiny_model()
    assert size.base == sum(p.numel() for p in model.parameters())
    assert size.outside == model.model.embed_tokens.weight.numel() + model.model.norm.weight.numel()
    assert size.quantizable == 2 * sum(
        m.weight.numel() for m in model.model.layers[0].modules() if isinstance(m, torch.nn.Linear)
    )
