"""Models that say that they take packed rows and do not are found out at the first use, and padded."""

import warnings
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from lightrl import RLModule
from lightrl.attention import takes_packed_rows
from lightrl.packing import pack
from lightrl.policy import PolicyForward, without_dropout
from tests.helpers.tiny import SMALL, by_hand, random_rollouts, tiny_model
from tests.helpers.training import quiet_trainer, tiny_data

MOSHI = {"ffn_dim": 48, "sliding_window": 64}
# What is wrong with each: layers drop `layout`, or add a mask of their own.
FAMILIES: dict[str, dict[str, Any]] = {"Nemotron": SMALL, "Moshi": SMALL | MOSHI, "Doge": SMALL}
# Attention sinks: eager attention is all that these have.
SINKS: dict[str, dict[str, Any]] = {"GraniteSWA": SMALL, "GraniteMoeSWA": SMALL | {"num_local_experts": 2}}


def build(family: str, arguments: dict[str, Any]) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**arguments))
    return without_dropout(model).train()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_only_says_that_it_takes_packed_rows_is_padded(family: str) -> None:
    model, forward = build(family, FAMILIES[family]), PolicyForward()
    assert takes_packed_rows(model), "no longer an example"
    rollouts = random_rollouts(5, members=2)
    with pytest.warns(UserWarning, match=rf"^{family}ForCausalLM does not take packed rows .*packed=False") as said:
        assert not forward.packer(model).share_prefix
    logprobs = forward(model, pack(rollouts, temperature=1.0))[0]
    assert len([w for w in said if "packed rows" in str(w.message)]) == 1
    right = torch.cat([by_hand(model, r.prompt_ids, r.completion_ids) for r in rollouts])
    assert (logprobs - right).abs().max() < 1e-5


@pytest.mark.parametrize("family", SINKS)
def test_a_model_with_eager_attention_only_is_padded(family: str) -> None:
    assert not takes_packed_rows(build(family, SINKS[family]))


class Memory(nn.Module):
    """Gives every token the mean of those before it in the row."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + hidden.cumsum(1) / torch.arange(1, hidden.shape[1] + 1)[:, None].to(hidden.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_computes_something_else_is_found_out(dtype: torch.dtype) -> None:
    good, bad = tiny_model().to(dtype), tiny_model().to(dtype)
    bad.model.norm = nn.Sequential(bad.model.norm, Memory())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert PolicyForward().packer(good).share_prefix
    with pytest.warns(UserWarning, match=r"Qwen3ForCausalLM .*logits differ by \d"):
        assert not PolicyForward().packer(bad).share_prefix


@pytest.mark.filterwarnings("ignore:Qwen3ForCausalLM does not take packed rows")
def test_the_trial_leaves_random_state_and_gradients_alone() -> None:
    model = tiny_model()
    model.model.norm = nn.Sequential(model.model.norm, nn.Dropout(0.5))  # as a router's noise
    model.train()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    PolicyForward()._is_packed(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in model.parameters())


def test_what_another_rank_finds_counts_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightrl.packing_check.all_objects", lambda mine: [mine, "it ran out of memory"])
    with pytest.warns(UserWarning, match="it ran out of memory"):
        assert not PolicyForward().packer(tiny_model()).share_prefix


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:NemotronForCausalLM does not take packed rows")
def test_a_sharded_model_trains_on_after_a_trial_that_failed() -> None:
    modules = [RLModule(build("Nemotron", SMALL), lr=1e-2, packed=packed) for packed in (None, False)]
    found = []
    for module in modules:
        quiet_trainer(max_steps=2).fit(module, tiny_data())
        found.append({n: p.full_tensor().clone() for n, p in module.policy.named_parameters()})
    assert modules[0].policy_forward.packed is False
    for name, right in found[1].items():
        assert torch.equal(found[0][name], right), name
