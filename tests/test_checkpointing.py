"""Activation checkpointing on packed rows: the backward runs layers again, and they must see the same borders."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from lightrl import RLModule
from lightrl.datamodule import SizedLoader
from lightrl.packing import StepBatch, pack
from lightrl.policy import PolicyForward
from tests.helpers.tiny import random_rollouts, tiny_model
from tests.helpers.training import quiet_trainer, weights

ROLLOUTS = random_rollouts(6, members=3, longest=14)


def gradient(model: Any, packed: bool, share: bool) -> Tensor:
    model.zero_grad()
    micro = pack(ROLLOUTS, temperature=1.0, share_prefix=share)
    (PolicyForward(packed, share)(model, micro)[0] * micro.advantages).sum().backward()
    return torch.cat([p.grad.flatten().double() for p in model.parameters()])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("packed", "share"), [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize("reentrant", [True, False])
def test_the_gradient_is_that_of_no_checkpointing(reentrant: bool, packed: bool, share: bool, attention: str) -> None:
    right = gradient(tiny_model().train(), False, False)
    model = tiny_model().train()
    model.set_attn_implementation(attention)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert (gradient(model, packed, share) - right).norm() < 1e-5 * right.norm()


class SGDModule(RLModule):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.policy.parameters(), lr=0.5)


def trained(model: Any, **args: Any) -> dict[str, Tensor]:
    module = SGDModule(model, **args)
    micro = [pack(ROLLOUTS[i::2], temperature=1.0, denominator=9.0) for i in range(2)]
    loader = SizedLoader(2, lambda _: StepBatch(micro, 0, ROLLOUTS))
    quiet_trainer(strategy="colocated_hf", max_steps=2).fit(module, loader)
    return weights(module.policy)


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [True, False])
def test_sharded_training_is_that_of_no_checkpointing(reentrant: bool) -> None:
    model = tiny_model()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    right = trained(tiny_model(), packed=False)
    for name, found in trained(model, packed=True).items():
        assert (found - right[name]).abs().max() < 1e-5, name


def test_a_model_that_was_packed_is_otherwise_what_it_was(tmp_path: Path) -> None:
    fresh, model = tiny_model(), tiny_model()
    gradient(model, True, True)
    assert model.config.to_dict() == fresh.config.to_dict()
    model.save_pretrained(tmp_path)
    assert "lightrl" not in json.dumps(json.loads((tmp_path / "config.json").read_text()))
    ids, mask = torch.tensor([[0, 0, 9, 17], [4, 5, 6, 7]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    asked: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
    right = fresh.eval().generate(**asked, output_logits=True, return_dict_in_generate=True)
    for other in (model, copy.deepcopy(model), Qwen3ForCausalLM.from_pretrained(tmp_path)):
        found = other.eval().generate(**asked, output_logits=True, return_dict_in_generate=True)
        assert torch.equal(found.sequences, right.sequences)
        assert torch.equal(torch.stack(found.logits), torch.stack(right.logits))
