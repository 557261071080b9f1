"""What of a model is trained and how: frozen parts, recomputed activations, compiled layers, references."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from lightrl import RLModule
from lightrl.lora import is_adapter
from lightrl.policy import PolicyForward
from lightrl.sharding import local_tensor
from lightrl.strategies import ColocatedHFStrategy
from lightrl.weights.canary import Canary
from lightrl.weights.source import iter_weights
from tests.helpers.fits import BAR, Witness
from tests.helpers.tiny import random_rollouts, tiny_model
from tests.helpers.training import equal, quiet_trainer, tiny_data, tiny_module, weights

LORA = {"r": 4}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"quantize": "8bit", "lora": LORA}, "quantize='8bit' is not one of"),
        ({"quantize": "4bit"}, "quantize='4bit' without lora"),
        ({"optimizer": "sgd"}, "optimizer='sgd' is not one of adamw,"),
        ({"reference_device": "disk"}, "reference_device='disk' is not one of"),
        ({"ref_refresh_every": -1, "kl_coef": 0.1}, "ref_refresh_every=-1"),
        ({"ref_refresh_every": 5}, "ref_refresh_every=5, reference_device=None: without kl_coef"),
        ({"reference_device": "cpu", "lora": LORA, "kl_coef": 0.1}, "reference_device='cpu' with lora"),
    ],
    ids=str,
)
def test_choices_out_of_range_are_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        RLModule("no/such/model", **wrong)


def test_a_path_that_leads_nowhere_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing_here", "./nothing_here", "~/nothing_here"):
        with pytest.raises(ValueError, match=r"cannot load '.*nothing_here': there is no such folder"):
            RLModule(path)
    RLModule("perhaps/on-the-hub")


# -- partial training -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trainable", [r"layers\.1\.", ["norm", "o_proj"]], ids=str)
def test_only_what_is_named_is_trained_and_all_of_it_reaches_the_engine(trainable: Any) -> None:
    module = tiny_module(trainable=trainable, lr=1e-2)
    quiet_trainer(max_steps=1).fit(module, tiny_data())
    start, now = weights(tiny_model()), weights(module.policy)
    patterns = [trainable] if isinstance(trainable, str) else trainable
    for name, tensor in now.items():
        assert torch.equal(tensor, start[name]) != any(re.search(p, name) for p in patterns), name
    in_optimizer = sum(p.numel() for g in module.trainer.optimizers[0].param_groups for p in g["params"])
    assert in_optimizer == sum(t.numel() for n, t in start.items() if any(re.search(p, n) for p in patterns))
    assert equal(dict(iter_weights(module.policy, torch.float32)), now)


def test_a_pattern_that_is_found_nowhere_is_named() -> None:
    with pytest.raises(ValueError, match=r"is found in no parameter's name: they are model.embed_tokens.weight"):
        tiny_module(trainable=["norm", r"layer\.9"]).configure_model()


# -- gradient checkpointing -------------------------------------------------------------------------------------------


def gradient(module: RLModule, packed: bool) -> dict[str, torch.Tensor]:
    module.policy_forward = PolicyForward(packed)
    rollouts = random_rollouts(5, members=2)
    module(module.policy_forward.packer(module.policy).pack(rollouts, temperature=1.0)).square().sum().backward()
    return {n: p.grad for n, p in module.policy.named_parameters() if p.grad is not None}


def calls_of_a_layer(module: RLModule) -> list[int]:
    calls: list[int] = []
    module.policy.model.layers[1].self_attn.register_forward_hook(lambda *_: calls.append(1))
    return calls


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_recomputed_activations_give_the_same_gradient(packed: bool, lora: Any) -> None:
    torch.manual_seed(0)
    right, module = (tiny_module(gradient_checkpointing=on, lora=lora) for on in (False, True))
    for m in (right, module):
        m.configure_model()
    module.load_state_dict(right.state_dict())
    calls, once = calls_of_a_layer(module), calls_of_a_layer(right)
    want, found = gradient(right, packed), gradient(module, packed)
    assert (len(calls), len(once)) == (2, 1), "nothing was computed again"
    assert want.keys() == found.keys()
    for name in want:
        torch.testing.assert_close(found[name], want[name])


def test_recomputing_changes_no_step_and_no_sample() -> None:
    """Generation is by the policy itself here: it must keep its cache."""
    modules = [tiny_module(gradient_checkpointing=on, lr=1e-2) for on in (False, True)]
    witness = Witness()
    for module in modules:
        quiet_trainer(max_steps=3, callbacks=[witness]).fit(module, tiny_data())
    assert len(witness.gaps) == 6
    assert max(witness.gaps) < BAR
    assert modules[1].policy.is_gradient_checkpointing
    for name, right in weights(modules[0].policy).items():
        torch.testing.assert_close(weights(modules[1].policy)[name], right, rtol=0, atol=1e-4)


# -- torch.compile ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("args", [{}, {"lora": LORA, "gradient_checkpointing": True}], ids=["full", "lora"])
def test_compiled_layers_give_the_same_gradient_and_serve_rows_of_any_length(args: Any) -> None:
    from torch._dynamo.utils import counters

    torch.manual_seed(0)
    counters.clear()
    right, module = (RLModule(tiny_model(layers=1), torch_compile=on, **args) for on in (False, True))
    for m in (right, module):
        m.configure_model()
    module.load_state_dict(right.state_dict())
    graphs = set()
    for count in (3, 5, 8):
        found = []
        for m in (right, module):
            packer = m.policy_forward.packer(m.policy)
            m.zero_grad()
            m(packer.pack(random_rollouts(count, seed=count), temperature=1.0)).sum().backward()
            found.append({n: p.grad for n, p in m.policy.named_parameters() if p.grad is not None})
        graphs.add(counters["stats"]["unique_graphs"])
        for name, want in found[0].items():
            torch.testing.assert_close(found[1][name], want, rtol=1e-4, atol=1e-5)
    assert len(graphs) == 1
    assert graphs.pop() > 0


def test_nothing_is_compiled_to_check_a_push() -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()  # what other tests have compiled would serve
    counters.clear()
    module = tiny_module(torch_compile=True)
    module.configure_model()
    assert len(Canary(module.policy.config.vocab_size).trainer_logprobs(module)) == 3
    assert not counters["stats"]["unique_graphs"]
    gradient(module, packed=True)
    assert counters["stats"]["unique_graphs"]


# -- the reference ----------------------------------------------------------------------------------------------------


class References(Callback):
    """What the reference says of fixed rollouts, before each step."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        micro = module.policy_forward.packer(module.policy).pack(random_rollouts(3), temperature=1.0)
        with torch.no_grad():
            self.seen.append(module.reference_logprobs(micro.to(module.device)).cpu())


def references(steps: int, ckpt: Any = None, **args: Any) -> tuple[list[torch.Tensor], RLModule]:
    torch.manual_seed(0)
    seen = References()
    module = tiny_module(kl_coef=0.01, lr=1e-2, **args)
    save = ModelCheckpoint(ckpt, every_n_train_steps=3, save_top_k=-1, filename="{step}") if ckpt else None
    resume = {"ckpt_path": ckpt / "step=3.ckpt"} if ckpt and (ckpt / "step=3.ckpt").exists() else {}
    callbacks = [seen, save] if save and not resume else [seen]
    trainer = quiet_trainer(max_steps=steps, callbacks=callbacks, enable_checkpointing=save in callbacks)
    trainer.fit(module, tiny_data(), **resume)
    return seen.seen, module


@pytest.mark.parametrize("args", [{}, {"reference_device": "cpu"}, {"lora": LORA}], ids=str)
def test_the_reference_is_refreshed_every_so_often_and_resumes(args: dict[str, Any], tmp_path: Path) -> None:
    seen, module = references(6, ckpt=tmp_path, ref_refresh_every=2, **args)
    same = [torch.equal(a, b) for a, b in zip(seen, seen[1:], strict=False)]
    assert same == [True, False, True, False, True]
    again, resumed = references(6, ckpt=tmp_path, ref_refresh_every=2, **args)
    assert len(again) == 3
    assert all(torch.equal(a, b) for a, b in zip(again, seen[3:], strict=True))
    assert equal(weights(resumed.policy), weights(module.policy))


def test_a_refreshed_adapter_reference_leaves_what_is_trained_alone() -> None:
    module = tiny_module(kl_coef=0.1, lora=LORA)
    module.configure_model()
    (reference,) = module._reference
    with torch.no_grad():
        for name, p in module.policy.named_parameters():
            if is_adapter(name):
                p.normal_(generator=torch.Generator().manual_seed(1))
    micro = module.policy_forward.packer(module.policy).pack(random_rollouts(3), temperature=1.0)
    reference.refresh()
    then = module(micro).detach()
    with torch.no_grad():
        for name, p in module.policy.named_parameters():
            if is_adapter(name):
                p.mul_(0.5)
    before = weights(module.policy)
    now = module(micro).detach()
    with torch.no_grad():
        assert torch.equal(module.reference_logprobs(micro), then)
    assert (now - then).abs().max() > 0.01
    assert equal(weights(module.policy), before)
    state = reference.state()
    reference.load({})
    with torch.no_grad():
        base = module.reference_logprobs(micro)
    reference.load(state)
    with torch.no_grad():
        assert torch.equal(module.reference_logprobs(micro), then)
    assert not torch.equal(base, then)
    assert equal(weights(module.policy), before)


def test_an_offloaded_reference_says_the_same() -> None:
    """Its parameters are where FSDP2 keeps offloaded ones; the figures are those of a reference on the device."""
    (right, _), (found, module) = references(2), references(2, reference_device="cpu")
    assert all(torch.equal(a, b) for a, b in zip(right, found, strict=True))
    assert module.reference is not None
    groups = [m._get_fsdp_state()._fsdp_param_group for m in module.reference.modules() if hasattr(m, "unshard")]
    assert all(p.offload_to_cpu for g in groups if g is not None for p in g.fsdp_params)


REFRESH = 2


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_an_offloaded_reference_is_in_cpu_memory_and_says_the_same(precision: Any, tmp_path: Path) -> None:
    found = []
    for device in (None, "cpu"):
        seen = References()
        module = tiny_module(kl_coef=0.01, lr=1e-2, reference_device=device, ref_refresh_every=REFRESH)
        trainer = quiet_trainer(accelerator="gpu", max_steps=4, precision=precision, callbacks=[seen])
        trainer.fit(module, tiny_data())
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        assert module.reference is not None
        assert {local_tensor(p).device.type for p in module.reference.parameters()} == {device or "cuda"}
        found.append(seen.seen)
    assert all(torch.equal(a, b) for a, b in zip(*(seen[:REFRESH] for seen in found), strict=True))
    moved = [float((seen[REFRESH] - seen[REFRESH - 1]).abs().mean()) for seen in found]
    assert min(moved) > 0.1
    for ours, right in zip(*found, strict=True):  # a GPU adds up gradients in any order, and bfloat16 makes more of it
        assert (ours - right).abs().mean() < min(moved) / 5
    assert "lightrl_reference" in torch.load(tmp_path / "last.ckpt", weights_only=True)


def test_an_unrefreshed_reference_is_in_no_checkpoint(tmp_path: Path) -> None:
    save = ModelCheckpoint(tmp_path, filename="last")
    quiet_trainer(max_steps=1, callbacks=[save], enable_checkpointing=True).fit(
        tiny_module(kl_coef=0.1, ref_refresh_every=5), tiny_data()
    )
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert "lightrl_reference" not in saved
    assert len(saved["state_dict"]) == len(tiny_model().state_dict())


# -- precision --------------------------------------------------------------------------------------------------------


def test_frozen_weights_are_kept_in_bf16_where_they_are_computed_in_it() -> None:
    modules: list[RLModule] = []
    for store in (True, False):
        torch.manual_seed(0)
        module = tiny_module(lora=LORA, lr=1e-2, kl_coef=0.1)
        strategy: Callable[..., Any] = ColocatedHFStrategy if store else Float32Base
        quiet_trainer(strategy=strategy(), max_steps=2, precision="bf16-mixed").fit(module, tiny_data())
        kinds = {is_adapter(n): p.dtype for n, p in module.policy.named_parameters()}
        assert kinds == {True: torch.float32, False: torch.bfloat16 if store else torch.float32}
        modules.append(module)
    first, second = ({n: t for n, t in weights(m.policy).items() if is_adapter(n)} for m in modules)
    assert equal(first, second)


class Float32Base(ColocatedHFStrategy):
    """Keeps frozen weights in float32, and rounds them at each forward."""

    def _shard(self, model: Any, **how: bool) -> None:
        frozen = [p for p in model.parameters() if not p.requires_grad]
        for p in frozen:
            p.requires_grad_(True)
        super()._shard(model, **how)
        for name, p in model.named_parameters():
            p.requires_grad_(is_adapter(name))
