"""Shortcuts of decoding: what is sampled and what is cached stays as it is, and most steps take them."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightrl.engines import compat
from lightrl.engines.late_output import LateOutput
from lightrl.engines.shortcuts import ShortSchedule, shorten_decoding
from lightrl.strategies import ColocatedVLLMStrategy
from lightrl.types import Completion
from tests.helpers.fits import cleaned_up, sampling, with_engine
from tests.helpers.tiny import tiny_model

PROMPTS = [[5, 9, 17], [4] * 31, [6, 7] * 16, [8] * 40]
"""Before, at and after the end of a block."""
TOKENS = 70
SCHEDULERS = ["vllm.v1.core.sched.scheduler.Scheduler", "vllm.v1.core.sched.async_scheduler.AsyncScheduler"]
ROOM = {"block_size": 32, "enable_prefix_caching": True, "max_num_seqs": 8}
"""Fewer at once than there are requests."""
CRAMPED = ROOM | {"num_gpu_blocks_override": 11}
"""Not enough blocks for as many as may run."""


def made_by(engine: Any) -> dict[str, Any]:
    """Tokens and logprobs, and how many tokens of a next turn were found in the cache."""
    options = sampling(num_completions=3, max_completion_tokens=TOKENS, prompt_seeds=(1, 2, 3, 4), stop_token_ids=())
    engine.llm.reset_prefix_cache()
    free = engine.generate(PROMPTS, options, 0)
    engine.llm.reset_prefix_cache()
    groups = engine.generate(PROMPTS, replace(options, stop_token_ids=(filler(free),)), 0)
    turns = [p + c.token_ids for p, group in zip(PROMPTS, groups, strict=True) for c in group]
    params = [compat.sampling_params(max_tokens=1, temperature=0.0)] * len(turns)
    again = compat.run_requests(engine.llm, [turn + [3] for turn in turns], params)
    return {
        "ids": [c.token_ids for group in (*free, *groups) for c in group],
        "logprobs": torch.cat([c.logprobs for group in (*free, *groups) for c in group]).tolist(),
        "cached": [o.num_cached_tokens for o in again],
    }


def filler(groups: list[list[Completion]]) -> int:
    """A token that, if it ends its completion, is sampled in the step that fills a block."""
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for ids in (c.token_ids for c in group):
            for place in range(2, len(ids)):
                if (len(prompt) + place) % ROOM["block_size"] == 0 and ids[place] not in ids[:place]:
                    return ids[place]
    raise AssertionError("no completion has a token of that kind")


def both_ways(args: dict[str, Any]) -> dict[str, Any]:
    """What is made with the shortcuts and without, requests that vLLM looked at on the way, and how many gave way."""
    found: dict[str, Any] = {"looked at": 0, "gave way": 0}

    def body(strategy: Any) -> None:
        with strategy._rollout_phase() as engine:  # awake
            scheduler: Any = compat.scheduler_of(engine.llm)
            schedule, update, preempt = scheduler.schedule, scheduler.update_from_output, scheduler._preempt_request
            whole = schedule._vllms

            def counted(*how: Any) -> Any:
                found["looked at"] += len(scheduler.running)
                return whole(*how)

            def preempted(*what: Any, **how: Any) -> Any:
                found["gave way"] += 1
                return preempt(*what, **how)

            schedule._vllms, scheduler._preempt_request = counted, preempted
            found["short"] = made_by(engine)
            scheduler.schedule, scheduler.update_from_output = whole, update._vllms
            found["whole"] = made_by(engine)

    with cleaned_up():
        with_engine(tiny_model(), body, ColocatedVLLMStrategy(max_model_len=128, engine_args=args))
    return found


@pytest.fixture(scope="module", params=SCHEDULERS, ids=["Scheduler", "AsyncScheduler"])
def made(request: pytest.FixtureRequest) -> dict[str, Any]:
    return both_ways({**ROOM, "scheduler_cls": request.param})


@pytest.mark.vllm
def test_what_is_sampled_and_cached_stays_as_it_is(made: dict[str, Any]) -> None:
    assert made["short"] == made["whole"]
    assert max(made["short"]["cached"]) >= 64


@pytest.mark.vllm
def test_most_steps_take_the_shortcut(made: dict[str, Any]) -> None:
    sampled = sum(len(ids) for ids in made["short"]["ids"])
    assert sampled > 300
    assert made["looked at"] < sampled / 4


@pytest.mark.vllm
@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=["Scheduler", "AsyncScheduler"])
def test_requests_that_gave_way_go_on_as_they_would_have(scheduler: str) -> None:
    made = both_ways({**CRAMPED, "scheduler_cls": scheduler})
    assert made["gave way"] > 0
    assert made["short"] == made["whole"]


class FullAttentionManager:
    block_size = 4


class SlidingWindowManager(FullAttentionManager):
    pass


class Scheduler:
    use_v2_model_runner = True
    max_num_running_reqs = 8

    def __init__(self, *groups: Any, **has: Any) -> None:
        self.kv_cache_manager = SimpleNamespace(coordinator=SimpleNamespace(single_type_managers=groups))
        self.schedule = self.update_from_output = max
        vars(self).update(has)


class AnotherScheduler(Scheduler):
    pass


def shortened(scheduler: Any) -> Any:
    core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler))
    shorten_decoding(SimpleNamespace(llm_engine=SimpleNamespace(engine_core=core, output_processor=None)))
    return scheduler


@pytest.mark.parametrize(
    ("groups", "has"),
    [
        ((SlidingWindowManager(),), {}),
        ((FullAttentionManager(), FullAttentionManager()), {}),
        ((FullAttentionManager(),), {"connector": object()}),
        ((FullAttentionManager(),), {"num_spec_tokens": 3}),
    ],
    ids=["a window", "two caches", "a connector", "speculation"],
)
def test_where_steps_are_not_all_alike_vllm_schedules(groups: tuple[Any, ...], has: dict[str, Any]) -> None:
    scheduler = shortened(Scheduler(*groups, **has))
    assert scheduler.schedule is max
    assert isinstance(scheduler.update_from_output, LateOutput)


def test_other_schedulers_are_left_alone() -> None:
    scheduler = shortened(AnotherScheduler(FullAttentionManager()))
    assert scheduler.schedule is scheduler.update_from_output is max
    scheduler = shortened(Scheduler(FullAttentionManager()))
    assert isinstance(scheduler.schedule, ShortSchedule)
    assert isinstance(scheduler.update_from_output, LateOutput)


def test_an_engine_in_another_process_is_left_alone() -> None:
    shorten_decoding(SimpleNamespace(llm_engine=SimpleNamespace(engine_core=object())))
