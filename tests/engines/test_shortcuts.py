"""Shortcuts of decoding: what is sampled and what is cached stays as it is, and most steps take them."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightrl.engines import compat
from lightrl.engines.shortcuts import shorten_decoding
from lightrl.strategies import ColocatedVLLMStrategy
from tests.helpers.fits import cleaned_up, sampling, with_engine
from tests.helpers.tiny import tiny_model

PROMPTS = [[5, 9, 17], [4] * 31, [6, 7] * 16, [8] * 40]
"""Before, at and after the end of a block."""
TOKENS = 70
SMALL_BLOCKS = {"block_size": 32, "enable_prefix_caching": True}


def made_by(engine: Any) -> dict[str, Any]:
    """Tokens and logprobs, and how many tokens of a next turn were found in the cache."""
    engine.llm.reset_prefix_cache()
    options = sampling(num_completions=3, max_completion_tokens=TOKENS, prompt_seeds=(1, 2, 3, 4))
    groups = engine.generate(PROMPTS, options, 0)
    turns = [p + c.token_ids for p, group in zip(PROMPTS, groups, strict=True) for c in group]
    params = [compat.sampling_params(max_tokens=2, temperature=0.0)] * len(turns)
    again = compat.run_requests(engine.llm, turns, params)
    return {
        "ids": [c.token_ids for group in groups for c in group],
        "logprobs": torch.cat([c.logprobs for group in groups for c in group]).tolist(),
        "cached": [o.num_cached_tokens for o in again],
    }


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    found: dict[str, Any] = {"steps": 0}

    def body(strategy: Any) -> None:
        with strategy._rollout_phase() as engine:  # awake
            manager = engine.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager
            short, whole = manager.allocate_slots, manager.allocate_slots.args[0]

            def counted(*args: Any, **how: Any) -> Any:
                found["steps"] += 1
                return whole(*args, **how)

            manager.allocate_slots = partial(short.func, counted, *short.args[1:])
            found["short"] = made_by(engine)
            manager.allocate_slots, manager.cache_blocks = whole, manager.cache_blocks.args[0]
            found["whole"] = made_by(engine)

    with cleaned_up():
        with_engine(tiny_model(), body, ColocatedVLLMStrategy(max_model_len=128, engine_args=SMALL_BLOCKS))
    return found


@pytest.mark.vllm
def test_what_is_sampled_and_cached_stays_as_it_is(made: dict[str, Any]) -> None:
    assert made["short"] == made["whole"]
    assert max(made["short"]["cached"]) >= 64


@pytest.mark.vllm
def test_most_steps_take_the_shortcut(made: dict[str, Any]) -> None:
    sampled = sum(len(ids) for ids in made["short"]["ids"])
    assert sampled > 300
    assert made["steps"] < sampled / 4


def engine_with(*groups: Any, **manager: Any) -> Any:
    held = SimpleNamespace(coordinator=SimpleNamespace(single_type_managers=groups), allocate_slots=max, **manager)
    scheduler = SimpleNamespace(kv_cache_manager=held)
    core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler))
    return SimpleNamespace(llm_engine=SimpleNamespace(engine_core=core)), held


class FullAttentionManager:
    block_size, req_to_blocks, num_cached_block = 4, {}, {}  # type: ignore[var-annotated]


class SlidingWindowManager(FullAttentionManager):
    pass


@pytest.mark.parametrize(
    "groups",
    [(), (SlidingWindowManager(),), (FullAttentionManager(), FullAttentionManager()), (FullAttentionManager(),)],
    ids=["none", "a window", "two", "nothing to return"],
)
def test_other_caches_are_left_alone(groups: tuple[Any, ...]) -> None:
    llm, manager = engine_with(*groups)
    assert not shorten_decoding(llm)
    assert manager.allocate_slots is max


def test_an_engine_in_another_process_is_left_alone() -> None:
    assert not shorten_decoding(SimpleNamespace(llm_engine=SimpleNamespace(engine_core=object())))
