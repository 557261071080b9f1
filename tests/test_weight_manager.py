"""One set of weights as vLLM and as a module by turns: what each holds, what is kept, what is refused."""

import gc
import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM, OpenAIGPTConfig, OpenAIGPTLMHeadModel, Qwen3ForCausalLM

from lightrl import WeightManager, clipped_policy_loss, get_logprobs, parse_vllm_outputs
from lightrl.engines.base import WeightSyncError
from tests.helpers.fits import BAR
from tests.helpers.tiny import by_hand, save_tiny, tiny_model

pytestmark = pytest.mark.vllm

PROMPTS = ["w5 w9 w17", "w4", "w6 w7 w8"]
ENGINE = {"max_model_len": 32}


def params(**args: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**{"n": 2, "temperature": 1.0, "logprobs": 1, "max_tokens": 6} | args)


def even(completion: str) -> float:
    return sum(int(w[1:]) % 2 == 0 for w in completion.split() if w[1:].isdigit())


def rollouts_of(manager: WeightManager, **args: Any) -> list[Any]:
    outputs = manager.as_vllm(**ENGINE).generate(PROMPTS, params(**args), use_tqdm=False)
    batches = parse_vllm_outputs(outputs, args.get("n", 2), even)
    for batch in batches:
        batch.compute_advantages()
    return [r for b in batches for r in b]


def train(manager: WeightManager, rollouts: list[Any]) -> None:
    model, optimizer = manager.as_trainable()
    optimizer.zero_grad()
    for i in torch.randperm(len(rollouts)):
        ids = rollouts[i].token_ids
        logprobs = get_logprobs(model(ids).logits, ids)
        clipped_policy_loss(logprobs, rollouts[i].old_logprobs, rollouts[i].advantage + 0.1).backward()
    optimizer.step()


def optimizer_bits(manager: WeightManager) -> list[torch.Tensor]:
    return [v.clone() for state in manager.optimizer.state.values() for v in state.values()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture
def manager(folder: Path) -> Iterator[WeightManager]:
    manager = WeightManager(folder, lr=1e-2)
    yield manager
    manager.close()


# -- what the engine holds ---------------------------------------------------------------------------------------------


def test_the_engine_says_what_the_module_says_after_each_update(manager: WeightManager) -> None:
    before: list[torch.Tensor] = []
    for _ in range(3):
        rollouts = rollouts_of(manager)
        model, _ = manager.as_trainable()
        for r in rollouts:
            assert float((by_hand(model, r.prompt_ids, r.completion_ids) - r.rollout_logprobs).abs().max()) < BAR
        before.append(by_hand(model, [5, 9], [17, 4, 8]))
        train(manager, rollouts)
    assert float((before[0] - before[2]).abs().max()) > 100 * BAR  # else a stale engine would have passed
    assert manager.pushes == 3


def test_weights_are_pushed_only_if_they_changed(manager: WeightManager) -> None:
    rollouts = rollouts_of(manager)
    llm = manager.as_vllm()
    assert manager.as_vllm(**ENGINE) is llm
    manager.switch_to_train()
    with manager.generation_mode():
        assert manager.pushes == 1
    train(manager, rollouts)
    manager.switch_to_generate()
    assert manager.pushes == 2
    model, _ = manager.as_trainable()
    model.model.norm.weight.data.mul_(1.5)  # which torch's own count of changes does not see
    manager.as_vllm()
    assert manager.pushes == 3
    with torch.no_grad():
        model.model.norm.weight.mul_(1.5)
    manager.as_vllm()  # still the engine's turn
    assert manager.pushes == 4


def test_swaps_keep_the_optimizer_and_lead_where_training_alone_does(folder: Path, manager: WeightManager) -> None:
    """Sampling in between leaves randomness alone, on which the order of the rollouts depends."""
    alone, rollouts = WeightManager(folder, lr=1e-2), rollouts_of(manager)
    for training in (manager, alone):
        torch.manual_seed(7)
        for _ in range(4):
            if training is manager:
                kept = optimizer_bits(manager)
                rollouts_of(manager)
                manager.as_trainable()
                assert all(torch.equal(a, b) for a, b in zip(kept, optimizer_bits(manager), strict=True))
            train(training, rollouts)
    pairs = zip(manager.policy.parameters(), alone.policy.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_sampling_has_randomness_of_its_own(manager: WeightManager) -> None:
    state = torch.get_rng_state()
    first, second = rollouts_of(manager, n=8), rollouts_of(manager, n=8)
    assert torch.equal(state, torch.get_rng_state())
    assert [r.completion_ids for r in first] != [r.completion_ids for r in second]


def test_context_managers_give_the_turn_back(manager: WeightManager) -> None:
    with manager.generation_mode(**ENGINE) as llm:
        assert llm.generate(PROMPTS, params(), use_tqdm=False)
        with manager.training_mode() as (model, optimizer):
            assert model(torch.tensor([5, 9])).logits.shape == (1, 2, 32)
            assert optimizer is manager.optimizer
        assert llm.generate(PROMPTS, params(), use_tqdm=False)
    assert manager.model(torch.tensor([[5, 9]])).logits.shape == (1, 2, 32)


class WithValueHead(Qwen3ForCausalLM):
    """A model that vLLM knows, and a head that it does not."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.value = nn.Linear(config.hidden_size, 1)


def test_heads_of_ones_own_are_trained_and_not_pushed() -> None:
    with torch.random.fork_rng():
        manager = WeightManager(WithValueHead(tiny_model().config), lr=1e-2, tokenizer=None)
    manager.policy.later = nn.Linear(128, 1)
    llm = manager.as_vllm(**ENGINE)
    (output,) = llm.generate([{"prompt_token_ids": [5, 9]}], params(n=1), use_tqdm=False)
    (batch,) = parse_vllm_outputs([output], 1)
    model, _ = manager.as_trainable()
    (rollout,) = batch
    assert torch.allclose(by_hand(model, [5, 9], rollout.completion_ids), rollout.old_logprobs, atol=BAR)
    manager.close()


# -- the end -----------------------------------------------------------------------------------------------------------


def surroundings() -> tuple[Any, ...]:
    return (
        dist.is_initialized(),
        torch.get_num_threads(),
        {t.name for t in threading.enumerate()},
        torch.get_rng_state().tolist(),
        {n for n in os.environ if n.startswith(("MASTER", "RANK", "LOCAL_RANK", "WORLD"))},
    )


@pytest.mark.parametrize("grouped", [False, True], ids=["alone", "in a process group"])
def test_parts_may_go_in_any_order(folder: Path, grouped: bool) -> None:
    WeightManager(folder).close()
    if grouped:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rollouts_of(first := WeightManager(folder))
    first.close()
    before = surroundings()
    for order in itertools.permutations(["manager", "llm", "module"]):
        manager = WeightManager(folder)
        parts: dict[str, Any] = {"manager": manager, "llm": manager.as_vllm(**ENGINE), "module": manager.as_trainable()}
        manager.as_vllm()
        del manager
        for name in order:
            del parts[name]
            gc.collect()
        assert surroundings() == before, order
    if grouped:
        assert dist.is_initialized()


def test_a_model_outlives_manager_and_engine(folder: Path) -> None:
    manager = WeightManager(folder)
    model, _ = manager.as_trainable()
    manager.as_vllm(**ENGINE)
    del manager
    gc.collect()
    assert model(torch.tensor([5, 9])).logits.isfinite().all()


# -- saving ------------------------------------------------------------------------------------------------------------


def test_state_goes_round_bit_by_bit(folder: Path, manager: WeightManager, tmp_path: Path) -> None:
    rollouts = rollouts_of(manager)
    train(manager, rollouts)
    torch.save(manager.state_dict(), tmp_path / "state.pt")
    other = WeightManager(folder, lr=1e-2)
    other.load_state_dict(torch.load(tmp_path / "state.pt"))
    for each in (manager, other):
        torch.manual_seed(3)
        train(each, rollouts)
    assert all(torch.equal(a, b) for a, b in zip(manager.policy.parameters(), other.policy.parameters(), strict=True))
    manager.save_pretrained(tmp_path / "saved")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert all(torch.equal(a, b) for a, b in zip(manager.policy.parameters(), saved.parameters(), strict=True))
    assert WeightManager(tmp_path / "saved").tokenizer_name == str(tmp_path / "saved")


def test_a_state_of_another_model_changes_nothing(manager: WeightManager) -> None:
    state = WeightManager(tiny_model(layers=1)).state_dict()
    before = [p.clone() for p in manager.policy.parameters()]
    with pytest.raises(ValueError, match=r"another model: model\.layers\.1"):
        manager.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(before, manager.policy.parameters(), strict=True))


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_a_path_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match=r"cannot load 'no/such/model'"):
        WeightManager("no/such/model")


def test_a_module_that_is_no_language_model() -> None:
    with pytest.raises(ValueError, match="Linear is no causal language model"):
        WeightManager(nn.Linear(2, 2))


def test_a_module_that_vllm_does_not_know(folder: Path) -> None:
    config = OpenAIGPTConfig(vocab_size=32, n_embd=32, n_layer=1, n_head=2, n_positions=64)
    manager = WeightManager(OpenAIGPTLMHeadModel(config), tokenizer=folder, lr=1e-2)
    state = surroundings()
    with pytest.raises(ValueError, match="vLLM cannot serve this OpenAIGPTLMHeadModel"):
        manager.as_vllm(**ENGINE)
    assert surroundings() == state
    model, optimizer = manager.as_trainable()
    model(torch.tensor([5, 9])).logits.sum().backward()
    optimizer.step()


def test_the_module_is_refused_while_it_is_the_engines_turn(manager: WeightManager) -> None:
    llm = manager.as_vllm(**ENGINE)
    ids = torch.tensor([5, 9])
    for call in (lambda: manager.model(ids), manager.optimizer.step, manager.state_dict):
        with pytest.raises(RuntimeError, match=r"engine's turn on the device: call as_trainable\(\) first"):
            call()
    assert llm.generate(PROMPTS, params(), use_tqdm=False)
    model, _ = manager.as_trainable()
    assert model(ids).logits.isfinite().all()


def test_the_engine_is_refused_while_it_is_the_trainers_turn(manager: WeightManager) -> None:
    llm = manager.as_vllm(**ENGINE)
    manager.as_trainable()
    with pytest.raises(RuntimeError, match=r"trainer's turn on the device: call as_vllm\(\) first"):
        llm.generate(PROMPTS, params(), use_tqdm=False)
    outputs = manager.as_vllm().generate(PROMPTS[:1], params(), use_tqdm=False)
    assert len(outputs) == 1  # nothing of the refused call is left


def test_a_module_of_another_shape_is_not_pushed(manager: WeightManager) -> None:
    manager.as_vllm(**ENGINE)
    model, _ = manager.as_trainable()
    right = model.model.norm.weight
    model.model.norm.weight = nn.Parameter(torch.ones(64))
    with pytest.raises(WeightSyncError, match=r"model\.norm\.weight is \[64\] .* and \[128\]"):
        manager.as_vllm()
    model.model.norm.weight = right
    assert len(rollouts_of(manager)) == 6


def test_other_engine_arguments_than_at_first(manager: WeightManager) -> None:
    llm = manager.as_vllm(**ENGINE)
    with pytest.raises(ValueError, match=r"was built with \{'max_model_len': 32\}"):
        manager.as_vllm(max_model_len=16)
    assert manager.as_vllm() is llm


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"lr": -1.0}, "lr=-1.0 must not be negative"),
        ({"optimizer": "adamm"}, "optimizer='adamm' is not one of adamw"),
        ({"precision": "16-mixed"}, "precision='16-mixed' is not one of 32-true"),
        ({"precision": "bf16-mixed"}, "needs a process group"),
        ({"precision": "bf16-true", "lr": 1e-6}, "mostly round away"),
    ],
    ids=str,
)
def test_arguments_out_of_range(folder: Path, args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WeightManager(folder, **args)
