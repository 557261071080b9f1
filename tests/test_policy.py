"""Logprobs of a policy on packed and padded rollouts, for one architecture after another."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightrl import RLModule, logprobs
from lightrl.balance import Packer
from lightrl.packing import MicroBatch, idle_rollout, pack
from lightrl.policy import PolicyForward, decoder_layers, load_config, load_policy, load_tokenizer, without_dropout
from lightrl.types import Prompt, Rollout, RolloutBatch, RolloutGroup
from tests.helpers.tiny import SMALL, VOCAB, by_hand, random_rollouts, save_tiny, tiny_model

GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
OPT = {"word_embed_proj_dim": 32, "ffn_dim": 48, "dropout": 0.5, "attention_dropout": 0.5, "layerdrop": 0.5}
WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
# Name, configuration, whether it runs packed, whether its head's output is its logits.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any], bool, bool]] = {
    "Qwen3": ("Qwen3", SMALL, True, True),
    "Qwen2": ("Qwen2", SMALL, True, True),
    "Llama": ("Llama", SMALL, True, True),
    "Llama, tied": ("Llama", SMALL | {"tie_word_embeddings": True}, True, True),
    "Mistral, short window": ("Mistral", SMALL | {"sliding_window": 4}, True, True),
    "Qwen2, some layers with a window": ("Qwen2", SMALL | WINDOW, True, True),
    "GPT-2": ("GPT2", GPT2, True, True),
    "Gemma2": ("Gemma2", SMALL | {"sliding_window": 4, "query_pre_attn_scalar": 8}, False, False),
    "Gemma3": ("Gemma3", SMALL | {"sliding_window": 4, "query_pre_attn_scalar": 8}, True, True),
    "Phi3": ("Phi3", SMALL | {"attention_dropout": 0.5, "resid_pdrop": 0.5}, True, True),
    "Granite, scaled logits": ("Granite", SMALL | {"logits_scaling": 3.0, "attention_multiplier": 0.2}, True, False),
    "OPT, with dropout": ("OPT", SMALL | OPT, True, True),
    "Seed-OSS, with dropout": ("SeedOss", SMALL | {"attention_dropout": 0.5, "residual_dropout": 0.5}, True, True),
}


def build(name: str) -> PreTrainedModel:
    """A model whose weights are large enough for attention to look at something."""
    family, arguments, _, _ = ARCHITECTURES[name]
    config = getattr(transformers, f"{family}TextConfig" if family == "Gemma3" else f"{family}Config")(**arguments)
    model: PreTrainedModel = getattr(transformers, f"{family}{'LMHeadModel' if family == 'GPT2' else 'ForCausalLM'}")(
        config
    )
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.15 * torch.randn(p.shape, generator=g)
    return without_dropout(model).train()


def one_at_a_time(model: PreTrainedModel, rollouts: list[Rollout], temperature: float) -> Tensor:
    found = []
    for r in rollouts:
        logits = model(input_ids=r.token_ids[None], use_cache=False).logits[0, len(r.prompt_ids) - 1 : -1]
        logprobs = (logits.float() / temperature).log_softmax(-1)
        found.append(logprobs.gather(1, torch.tensor(r.completion_ids)[:, None])[:, 0])
    return torch.cat(found)


def gradients(model: PreTrainedModel, logprobs: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_packed_equals_one_sequence_at_a_time(name: str) -> None:
    model, (_, _, packed, head_is_last) = build(name), ARCHITECTURES[name]
    rollouts = random_rollouts(6, seed=3, longest=12)
    right = one_at_a_time(model, rollouts, 0.8)
    grads = gradients(model, right)
    forward = PolicyForward()
    micro = pack(rollouts, temperature=0.8)
    logprobs, entropy = forward(model, micro)
    assert (forward.packed, forward._head_is_last) == (packed, head_is_last)
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert not entropy.requires_grad
    assert (logprobs - right).abs().max() < 1e-5
    for n, grad in gradients(model, logprobs).items():
        assert (grad - grads[n]).abs().max() < 1e-5 * max(1.0, float(grads[n].abs().max())), n
    padded, padded_entropy = PolicyForward(packed=False)(model, micro)
    assert (padded - right).abs().max() < 1e-5
    assert (padded_entropy - entropy).abs().max() < 1e-5


def test_the_comparison_sees_a_window_that_is_not_applied_and_a_border_that_is_not_there() -> None:
    rollouts = random_rollouts(6, seed=3, longest=12)
    windowed = build("Mistral, short window")
    right = one_at_a_time(windowed, rollouts, 1.0)
    for layer in windowed.model.layers:
        layer.self_attn.sliding_window = windowed.config.sliding_window = None
    assert (one_at_a_time(windowed, rollouts, 1.0) - right).abs().max() > 1e-2
    model = build("Llama")
    right = one_at_a_time(model, rollouts, 1.0)
    micro = pack(rollouts, temperature=1.0)
    micro.lengths, micro.prefixes = [sum(micro.lengths)], [-1]
    assert (PolicyForward(packed=True)(model, micro)[0] - right).abs().max() > 1e-2


def hand_made_rollouts() -> list[Rollout]:
    prompts = [[5], [5, 9, 17], [4, 4, 8, 21, 30, 6], [9]]
    completions = [[23, 31, 7, 2], [23, 31, 7, 2], [2], [11]]
    return [Rollout(p, c, torch.zeros(len(c)), advantage=1.0) for p, c in zip(prompts, completions, strict=True)]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_b11_index_i_is_token_i(packed: bool, temperature: float) -> None:
    model, rollouts = tiny_model(), hand_made_rollouts()
    micro = pack(rollouts, temperature=temperature)
    logprobs = PolicyForward(packed)(model, micro)[0]
    right = torch.cat([by_hand(model, r.prompt_ids, r.completion_ids, temperature) for r in rollouts])
    assert logprobs.shape == (10,)
    assert (logprobs - right).abs().max() < 1e-5
    assert (logprobs - right.roll(1)).abs().max() > 1e-2


def on_policy_metrics(model: PreTrainedModel, parts: list[list[Rollout]]) -> list[tuple[Tensor, Tensor]]:
    module = RLModule(model)
    module.configure_model()
    found = []
    for part in parts:
        micro = pack(part, temperature=1.0)
        logprobs = module(micro)
        loss, metrics = module.loss(micro, logprobs)
        assert logprobs.dtype == torch.float32
        # Every ratio is 1 and every advantage 1, so the sum of terms is minus the number of tokens, exactly.
        found.append((loss.detach() + len(logprobs), metrics["train/clip_frac"]))
    return found


@pytest.mark.parametrize("cuts", [1, 2])
def test_b11_on_policy_ratio_is_one(cuts: int) -> None:
    for off, clipped in on_policy_metrics(tiny_model(), Packer().split(hand_made_rollouts(), cuts)):
        assert off == 0
        assert not clipped.any()


@torch.no_grad()
def score_in(model: PreTrainedModel, parts: list[list[Rollout]]) -> None:
    """Write the logprobs of before the first update on the rollouts, computed in these micro-batches."""
    for part in parts:
        found = PolicyForward()(model, pack(part, temperature=1.0), with_entropy=False)[0]
        for r, piece in zip(part, found.split([len(r.completion_ids) for r in part]), strict=True):
            r.scored_logprobs = piece


@pytest.mark.parametrize("cuts", [1, 4])
@pytest.mark.parametrize("autocast", [False, True])
def test_b13_scored_in_the_same_micro_batches_the_ratio_is_exactly_one_in_bfloat16(cuts: int, autocast: bool) -> None:
    """With gradient or without, with entropy or without. In others it is not: RLModule's first update scores none."""
    model = tiny_model() if autocast else tiny_model().to(torch.bfloat16)
    rollouts = random_rollouts(12, longest=40)
    for r in rollouts:
        r.advantage = 1.0
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        parts = Packer().split(rollouts, cuts)
        score_in(model, parts)
        for off, clipped in on_policy_metrics(model, parts):
            assert off == 0
            assert not clipped.any()
        score_in(model, Packer().split(rollouts, 5 - cuts))
        assert any(off != 0 for off, _ in on_policy_metrics(model, parts)), "the comparison sees no rounding"


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", ["Qwen3", "Granite, scaled logits"])
def test_b13_logprobs_of_a_bfloat16_model_are_float32(name: str, packed: bool) -> None:
    model = build(name).to(torch.bfloat16)
    micro = pack(random_rollouts(4), temperature=1.0)
    logprobs, entropy = PolicyForward(packed)(model, micro)
    assert logprobs.dtype == entropy.dtype == torch.float32
    spread = logprobs.detach().to(torch.bfloat16).float() - logprobs
    assert spread.abs().max() > 1e-4, "rounded to bfloat16 on the way"


def test_b16_a_pad_valued_token_is_a_token() -> None:
    model = tiny_model()
    rollouts = [
        Rollout([0, 5, 0], [0, 6, 0], torch.zeros(3)),
        Rollout([0], [2], torch.zeros(1)),
        Rollout([5] * 9, [3], torch.zeros(1)),
    ]
    right = torch.cat([by_hand(model, r.prompt_ids, r.completion_ids) for r in rollouts])
    for packed in (True, False):
        found = PolicyForward(packed)(model, pack(rollouts, temperature=1.0))[0]
        assert (found - right).abs().max() < 1e-5


def test_b16_the_eos_is_trained_on() -> None:
    """With one rollout of advantage 1, a step raises the logprob of its EOS, which is also the pad token."""
    model = tiny_model()
    rollout = Rollout([5, 2], [7, 2], torch.zeros(2), advantage=1.0)
    micro: MicroBatch = pack([rollout], temperature=1.0)
    before = by_hand(model, [5, 2], [7, 2])
    PolicyForward()(model, micro)[0].sum().backward()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.01 * p.grad
    after = by_hand(model, [5, 2], [7, 2])
    assert (after > before + 0.01).all()


@pytest.mark.parametrize("name", ["Qwen3", "Granite, scaled logits"])
def test_scoring_computes_no_entropy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    chunked = logprobs.chunked_token_logprobs

    def noted(*args: Any, with_entropy: bool = True, **more: Any) -> Any:
        asked.append(with_entropy)
        return chunked(*args, with_entropy=with_entropy, **more)

    monkeypatch.setattr("lightrl.policy.chunked_token_logprobs", noted)
    monkeypatch.setattr("lightrl.policy.entropy", lambda *_: asked.append(True))
    module = RLModule(build(name), kl_coef=0.1)
    module.configure_model()
    rollouts = random_rollouts(3)
    module.score(RolloutBatch([RolloutGroup(Prompt([1]), rollouts)]), max_tokens=99, reused=True)
    assert True not in asked
    right = PolicyForward()(module.policy, pack(rollouts, temperature=1.0))[0]
    asked.clear()
    assert torch.equal(torch.cat([r.scored_logprobs for r in rollouts]), right)
    module.full_loss(pack(rollouts, temperature=1.0))
    assert True in asked


def test_an_idle_rollout_runs_through_and_gives_no_gradient() -> None:
    module = RLModule(tiny_model(), kl_coef=0.1)
    module.configure_model()
    micro = pack([idle_rollout()], temperature=1.0, denominator=1.0)
    module.loss(micro, module(micro))[0].backward()
    assert all(p.grad is None or not p.grad.any() for p in module.policy.parameters())


def test_the_head_is_put_back() -> None:
    model = tiny_model(layers=1)
    micro = pack(random_rollouts(2), temperature=1.0)
    PolicyForward()(model, micro)
    assert model(input_ids=torch.tensor([[3, 4]])).logits.shape == (1, 2, VOCAB)
    micro.targets = micro.targets[:-1]
    with pytest.raises(ValueError, match="expected hidden"):
        PolicyForward()(model, micro)
    assert model(input_ids=torch.tensor([[3, 4]])).logits.shape == (1, 2, VOCAB)


@pytest.mark.parametrize("name", ["Qwen3", "GPT-2", "Gemma2", "OPT, with dropout"])
def test_decoder_layers_are_found(name: str) -> None:
    layers = decoder_layers(build(name))
    assert len(layers) == 2
    assert len({type(x) for x in layers}) == 1


def test_decoder_layers_of_a_model_that_names_none() -> None:
    model = nn.Module()
    model.heads = nn.ModuleList([nn.Linear(1, 1)])
    model.blocks = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])
    model.mixed = nn.ModuleList([nn.Linear(2, 2), nn.ReLU(), nn.ReLU(), nn.ReLU()])
    assert decoder_layers(model) == list(model.blocks)
    with pytest.raises(ValueError, match="Linear has no decoder layers"):
        decoder_layers(nn.Linear(1, 1))


@pytest.mark.parametrize(("targets", "saved", "fused"), [(["lm_head"], None, False), (["q_proj"], ["lm_head"], True)])
def test_an_adapter_on_the_head_counts_and_is_trained(targets: list[str], saved: list[str] | None, fused: bool) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, target_modules=targets, modules_to_save=saved, init_lora_weights=False)
    torch.manual_seed(0)
    model = peft.get_peft_model(tiny_model(tied=False), lora)
    with torch.no_grad():  # away from the weight that they start as a copy of
        for p in model.parameters():
            p += 0.1 * p.requires_grad
    rollouts = random_rollouts(4, seed=3)
    right = one_at_a_time(model, rollouts, 0.8)
    grads = gradients(model, right)
    forward = PolicyForward()
    logprobs = forward(model, pack(rollouts, temperature=0.8))[0]
    assert forward._head_is_last == fused
    assert (logprobs - right).abs().max() < 1e-5
    found = gradients(model, logprobs)
    assert found.keys() == grads.keys() == {n for n, p in model.named_parameters() if p.requires_grad}
    for n, grad in found.items():
        assert (grad - grads[n]).abs().max() < 1e-5 * max(1.0, float(grads[n].abs().max())), n


def test_load_policy_gives_float32_without_dropout(tmp_path: Any) -> None:
    folder = save_tiny(tmp_path)
    tiny_model().to(torch.bfloat16).save_pretrained(folder)
    policy = load_policy(folder)
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    assert policy.training
    assert load_config(folder).vocab_size == VOCAB
    assert load_tokenizer(folder).eos_token_id == 2


@pytest.mark.parametrize("load", [load_policy, load_config, load_tokenizer])
def test_a_model_that_is_not_there_is_a_value_error(load: Any, tmp_path: Any) -> None:
    with pytest.raises(ValueError, match=r"cannot load '.*nothing_here'[\s\S]*Give a folder"):
        load(tmp_path / "nothing_here")
