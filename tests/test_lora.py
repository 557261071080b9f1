"""LoRA: what is bound, what is merged, what is trained and saved, and the reference with adapters off."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightrl import RLModule
from lightrl.algorithms import GRPO
from lightrl.lora import adapters_off, is_adapter, lora_arguments, lora_layers
from lightrl.policy import load_policy
from lightrl.weights.source import iter_weights
from tests.helpers.tiny import by_hand, random_rollouts, save_tiny, tiny_model
from tests.helpers.training import equal, quiet_trainer, tiny_data, weights

peft = pytest.importorskip("peft")

PLACES = [{}, {"target_modules": ["q_proj", "lm_head", "embed_tokens"]}]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def with_adapters(scale: float = 0.3, tied: bool = False, dtype: torch.dtype = torch.float32, **args: Any) -> RLModule:
    """A policy whose adapters are far from doing nothing."""
    lora = {"r": 4, "lora_alpha": 6} | args.pop("lora", {})
    module = RLModule(tiny_model(tied=tied).to(dtype), lora=lora, **args)
    module.configure_model()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.policy.named_parameters():
            if is_adapter(name):
                parameter.copy_(scale * torch.randn(parameter.shape, generator=draw))
    return module


def merged_model(module: RLModule, tied: bool = False) -> Any:
    model = tiny_model(tied=tied)
    found = model.load_state_dict(dict(iter_weights(module.policy, torch.float32)), strict=False)
    assert not found.unexpected_keys
    assert found.missing_keys == (["lm_head.weight"] if tied else [])
    return model.eval()


def base_of(module: RLModule) -> dict[str, torch.Tensor]:
    return {n: t for n, t in weights(module.policy).items() if not is_adapter(n)}


# -- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"foo": 1}, "lora has 'foo'"),
        (3, "lora=3 must be"),
        ({"lora_dropout": 0.1}, "lora lora_dropout=0.1"),
        ({"use_dora": True}, "lora use_dora=True"),
        ({"bias": "all"}, "lora bias='all'"),
        ({"init_lora_weights": "pissa"}, "lora init_lora_weights='pissa'"),
        ({"modules_to_save": ["lm_head"]}, "lora modules_to_save=['lm_head']"),
    ],
    ids=str,
)
def test_what_lora_cannot_do_here_is_refused_by_name(wrong: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        RLModule("no/such/model", lora=wrong)


def test_a_config_and_its_dict_are_the_same() -> None:
    config = peft.LoraConfig(r=16, lora_alpha=32, target_modules=["v_proj", "q_proj"], task_type="CAUSAL_LM")
    plain = {"r": 16, "lora_alpha": 32, "target_modules": ["q_proj", "v_proj"]}
    assert lora_arguments(config) == lora_arguments(plain) == plain
    assert lora_arguments(None) is None
    assert lora_arguments({}) == {}


def test_modules_that_match_nothing_are_refused_and_the_names_that_there_are_shown() -> None:
    module = RLModule(tiny_model(), lora={"target_modules": ["query"]})
    with pytest.raises(ValueError, match="target_modules=\\['query'\\].*down_proj.*q_proj"):
        module.configure_model()


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens"])
def test_tied_embeddings_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"lora on .*{name}.*one tensor"):
        RLModule(tiny_model(tied=True), lora={"target_modules": ["q_proj", name]}).configure_model()


def test_adapters_of_ones_own_are_refused_not_lost() -> None:
    model = peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["q_proj"]), tiny_model())
    with pytest.raises(ValueError, match="has adapters already"):
        RLModule(model, lora={}).configure_model()
    with pytest.raises(ValueError, match="1 of 2|2 of 2 LoRA modules are at work and 0 were bound"):
        list(iter_weights(model, torch.float32))


def test_adapters_and_other_trained_parameters_do_not_mix() -> None:
    with pytest.raises(ValueError, match="trainable=.*with lora"):
        RLModule("no/such/model", lora={}, trainable="norm")


def test_binding_leaves_random_state_alone_and_follows_the_seed() -> None:
    def adapters(seed: int) -> dict[str, torch.Tensor]:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            module = RLModule(tiny_model(), lora={})
            before = torch.get_rng_state()
            module.configure_model()
            assert torch.equal(before, torch.get_rng_state())
        return {n: t for n, t in weights(module.policy).items() if is_adapter(n)}

    assert equal(adapters(1), adapters(1))
    assert not equal(adapters(1), adapters(2))


# -- merging ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_untrained_adapters_change_nothing(tied: bool) -> None:
    module = RLModule(tiny_model(tied=tied), lora={})
    module.configure_model()
    assert equal(dict(iter_weights(module.policy, torch.float32)), weights(tiny_model(tied=tied)))


@pytest.mark.parametrize("lora", [*PLACES, {"use_rslora": True}, {"rank_pattern": {"q_proj": 2}}], ids=str)
def test_the_merged_model_is_the_policy(lora: dict[str, Any]) -> None:
    """The trainer's logprobs, whatever path they take, are those of a plain model with the weights that are pushed."""
    module = with_adapters(lora=lora)
    merged = merged_model(module)
    for r in random_rollouts(4):
        right = by_hand(merged, r.prompt_ids, r.completion_ids)
        assert (right - by_hand(tiny_model(tied=False), r.prompt_ids, r.completion_ids)).abs().max() > 0.05
        assert (by_hand(module.policy, r.prompt_ids, r.completion_ids) - right).abs().max() < 1e-5
        packer = module.policy_forward.packer(module.policy)
        found = module(packer.pack([r], temperature=1.0)).detach()
        assert (found - right).abs().max() < 1e-5


def test_transposed_matrices_are_merged_the_right_way_round() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=32, n_embd=32, n_layer=1, n_head=2, n_positions=64)
    module = RLModule(GPT2LMHeadModel(config), lora={"target_modules": ["c_attn"], "fan_in_fan_out": True})
    module.configure_model()
    with torch.no_grad():
        for name, parameter in module.policy.named_parameters():
            if is_adapter(name):
                parameter.normal_()
    plain = GPT2LMHeadModel(config)
    plain.load_state_dict(dict(iter_weights(module.policy, torch.float32)), strict=False)
    ids = torch.arange(12)[None]
    torch.testing.assert_close(module.policy.eval()(ids).logits, plain.eval()(ids).logits, rtol=0, atol=1e-5)


def test_b36_syncs_leave_a_bf16_base_as_it_was() -> None:
    module = with_adapters(dtype=torch.bfloat16, kl_coef=0.1)
    before = weights(module.policy)
    first = module.reference_logprobs(pack_one(module))
    for _ in range(10):
        pushed = dict(iter_weights(module.policy, torch.bfloat16))
    assert equal(weights(module.policy), before)
    assert torch.equal(module.reference_logprobs(pack_one(module)), first)
    layer = module.policy.model.layers[0].mlp.up_proj
    base, a, b = layer.base_layer.weight, layer.lora_A["default"].weight, layer.lora_B["default"].weight
    right = (base.float() + 1.5 * (b.float() @ a.float())).to(torch.bfloat16)
    assert torch.equal(pushed["model.layers.0.mlp.up_proj.weight"], right)
    assert not torch.equal(right, base)
    assert set(pushed) == set(weights(tiny_model(tied=False)))


def pack_one(module: RLModule) -> Any:
    return module.policy_forward.packer(module.policy).pack(random_rollouts(3), temperature=1.0)


def test_b36_an_error_in_the_middle_of_a_push_leaves_the_policy_as_it_was() -> None:
    module = with_adapters()
    before, weights_ = weights(module.policy), iter_weights(module.policy, torch.float32)
    for _ in range(5):
        next(weights_)
    weights_.close()
    assert equal(weights(module.policy), before)
    assert not any(layer.merged or layer.disable_adapters for layer in lora_layers(module.policy).values())


def test_a_push_without_some_of_the_adapters_raises() -> None:
    module = with_adapters()
    with adapters_off(module.policy), pytest.raises(ValueError, match="0 of 14 LoRA modules are at work and 14 were"):
        list(iter_weights(module.policy, torch.float32))
    lora_layers(module.policy)["model.layers.1.mlp.up_proj"].merge()
    with pytest.raises(ValueError, match="13 of 14 LoRA modules"):
        list(iter_weights(module.policy, torch.float32))


# -- the reference ----------------------------------------------------------------------------------------------------


def test_adapters_off_is_the_frozen_copy_with_the_memory_of_one_model() -> None:
    module = with_adapters(kl_coef=0.1)
    micro = pack_one(module)
    right = torch.cat([by_hand(tiny_model(tied=False), r.prompt_ids, r.completion_ids) for r in random_rollouts(3)])
    with torch.no_grad():
        found, now = module.reference_logprobs(micro), module(micro)
    copied = RLModule(tiny_model(tied=False), kl_coef=0.1)
    copied.configure_model()
    with torch.no_grad():
        assert (found - copied.reference_logprobs(micro)).abs().max() <= 1e-6
    assert (found - right).abs().max() < 1e-5
    assert (now - right).abs().max() > 0.05
    assert module.reference is None
    assert torch.equal(module(micro).detach(), now), "the adapters are on again"


def test_an_error_while_scoring_turns_the_adapters_on_again() -> None:
    module = with_adapters()
    with pytest.raises(RuntimeError, match="boom"), adapters_off(module.policy):
        raise RuntimeError("boom")
    assert not any(layer.disable_adapters for layer in lora_layers(module.policy).values())


def test_kl_grows_from_zero_as_adapters_learn() -> None:
    seen: list[float] = []

    class Watched(RLModule):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            super().on_train_batch_end(outputs, batch, batch_idx)
            seen.append(float(self.trainer.callback_metrics["kl/ref"]))

    module = Watched(tiny_model(), lora={"r": 4}, kl_coef=0.1, lr=1e-2)
    quiet_trainer(max_steps=3).fit(module, tiny_data())
    assert abs(seen[0]) < 1e-9
    assert min(seen[1:]) > 1e-5


# -- training and checkpoints -----------------------------------------------------------------------------------------


def test_only_adapters_are_trained(tiny_folder: Path) -> None:
    module = RLModule(tiny_folder, lora={"r": 4}, lr=1e-2, weight_decay=0.1)
    quiet_trainer(max_steps=2).fit(module, tiny_data())
    assert equal(dict(strip(base_of(module))), weights(load_policy(tiny_folder)))
    trained = {id(p) for g in module.trainer.optimizers[0].param_groups for p in g["params"]}
    assert trained == {id(p) for n, p in module.policy.named_parameters() if is_adapter(n)}


def strip(tensors: dict[str, torch.Tensor]) -> Any:
    return ((name.replace("base_layer.", ""), tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_resume_is_exact_and_the_checkpoint_has_adapters_only(
    tiny_folder: Path, tmp_path: Path, kl_coef: float
) -> None:
    def fit(steps: int, **args: Any) -> RLModule:
        lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
        module = GRPO(tiny_folder, lora=lora, lr=1e-2, kl_coef=kl_coef)
        torch.manual_seed(5 if args.get("ckpt_path") else 4)  # other adapters to begin with, but for the checkpoint
        save = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1, filename="{step}")
        trainer = quiet_trainer(max_steps=steps, callbacks=[save], enable_checkpointing=True)
        trainer.fit(module, tiny_data(), **args)
        return module

    whole = fit(4)
    path = tmp_path / "step=2.ckpt"
    saved = torch.load(path, weights_only=True)
    assert saved["hyper_parameters"]["lora"] == {"r": 2, "target_modules": ["q_proj", "v_proj"]}
    assert len(saved["state_dict"]) == 8
    assert all(is_adapter(name) for name in saved["state_dict"])
    assert sum(t.numel() for t in saved["state_dict"].values()) < 0.05 * sum(
        p.numel() for p in tiny_model().parameters()
    )
    resumed = fit(4, ckpt_path=path)
    assert equal(weights(resumed.policy), weights(whole.policy))
    del saved["state_dict"]["policy.model.layers.1.self_attn.q_proj.lora_B.default.weight"]
    torch.save(saved, tmp_path / "less.ckpt")
    with pytest.raises(RuntimeError, match="lacks policy.model.layers.1.self_attn.q_proj.lora_B"):
        fit(4, ckpt_path=tmp_path / "less.ckpt")
    loaded = GRPO.load_from_checkpoint(tmp_path / "step=4.ckpt")
    assert equal(weights(loaded.policy), weights(whole.policy))


def test_a_checkpoint_without_one_of_the_adapters_is_refused_by_its_name() -> None:
    module = with_adapters()
    state = module.state_dict()
    name = "policy.model.layers.1.mlp.up_proj.lora_B.default.weight"
    del state[name]
    with pytest.raises(RuntimeError, match=re.escape(name)) as error:
        module.load_state_dict(state)
    assert "base_layer" not in str(error.value)
    with pytest.raises(RuntimeError, match="nonsense"):
        module.load_state_dict(module.state_dict() | {"policy.nonsense": torch.zeros(1)})
