"""What a request samples is put together at its end: the same tokens and logprobs, whatever happens on the way."""

from types import SimpleNamespace
from typing import Any

import pytest

from lightrl.engines import compat, late_output
from lightrl.engines.late_output import LateOutput
from lightrl.engines.vllm import OUTPUT
from lightrl.rng import forked_rng
from lightrl.strategies import ColocatedVLLMStrategy
from tests.helpers.fits import cleaned_up, with_engine
from tests.helpers.tiny import tiny_model

SCHEDULERS = ["vllm.v1.core.sched.scheduler.Scheduler", "vllm.v1.core.sched.async_scheduler.AsyncScheduler"]
ARGS = {"block_size": 32, "enable_prefix_caching": True, "max_num_batched_tokens": 64, "enable_chunked_prefill": True}
LENGTHS = (200, 3, 50, 1, 30, 27)
"""The first ends where the model's context does."""
HALFWAY = 20
OTHERS = {"logprobs": 2, "flat_logprobs": False, "detokenize": False}
"""Of requests that are read otherwise."""


def begin(engine: Any) -> None:
    """Requests that end by length, by a token, or with their first; one longer than a step takes; one of three samples;
    and one that somebody reads otherwise."""
    for i, length in enumerate(LENGTHS):
        options = {"max_tokens": length, "n": 3 if i == 2 else 1}
        stops = list(range(20, 23)) if i else []
        how = OTHERS if i == len(LENGTHS) - 1 else OUTPUT
        params = compat.sampling_params(**how, **options, stop_token_ids=stops, ignore_eos=not i)
        add_request(engine, f"{i}", [5 + i] * (90 if i == 4 else 20), params)


def add_request(engine: Any, name: str, ids: list[int], params: Any) -> None:
    if params.logprobs == 0:
        compat.add_request(engine, name, ids, params)
    else:
        engine.add_request(name, {"prompt_token_ids": ids}, params)


def made_by(llm: Any, halfway: Any) -> dict[str, Any]:
    engine, found, step = llm.llm_engine, {}, 0
    begin(engine)
    with forked_rng(0):
        while engine.has_unfinished_requests():
            step += 1
            if step == HALFWAY:
                found["halfway"] = halfway(llm)
            for output in engine.step():
                if output.finished:
                    found[output.request_id] = [(list(o.token_ids), values(o), o.finish_reason) for o in output.outputs]
    return found


def values(sample: Any) -> list[float]:
    if hasattr(sample.logprobs, "logprobs"):
        return list(sample.logprobs.logprobs)
    return [x[t].logprob for t, x in zip(sample.token_ids, sample.logprobs, strict=True)]


def looked_at(llm: Any) -> Any:
    so_far = compat.sampled_so_far(llm, under_way=False)  # of what was noted too, before it is put together
    return compat.sampled_by(llm), so_far


def begun_again(llm: Any) -> None:
    llm.llm_engine.reset_prefix_cache(reset_running_requests=True)


def one_dropped(llm: Any) -> None:
    llm.llm_engine.abort_request(["0"])


@pytest.fixture(scope="module", params=SCHEDULERS, ids=["Scheduler", "AsyncScheduler"])
def made(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def body(strategy: Any) -> None:
        with strategy._rollout_phase() as engine:
            scheduler = compat.scheduler_of(engine.llm)
            late = scheduler.update_from_output
            for what in (looked_at, begun_again, one_dropped):
                kept = [made_by(engine.llm, what)]
                scheduler.update_from_output = late._vllms
                engine.llm.reset_prefix_cache()
                kept.append(made_by(engine.llm, what))
                scheduler.update_from_output = late
                engine.llm.reset_prefix_cache()
                found[what.__name__] = kept
            seen: list[int] = []
            late._vllms = counted(late._vllms, seen)
            found["tokens"] = made_by(engine.llm, lambda _: None)
            found["vllm's"] = sum(seen)

    with cleaned_up():
        args = {**ARGS, "scheduler_cls": request.param}
        with_engine(tiny_model(), body, ColocatedVLLMStrategy(max_model_len=128, engine_args=args))
    return found


def counted(whole: Any, seen: list[int]) -> Any:
    def update(scheduled: Any, sampled: Any) -> Any:
        seen.append(len(scheduled.num_scheduled_tokens))
        return whole(scheduled, sampled)

    return update


@pytest.mark.vllm
@pytest.mark.parametrize("halfway", ["looked_at", "begun_again", "one_dropped"])
def test_tokens_logprobs_and_reasons_stay_as_they_are(made: dict[str, Any], halfway: str) -> None:
    late, vllms = made[halfway]
    assert late == vllms
    assert {reason for name, samples in late.items() if name != "halfway" for *_, reason in samples} == {
        "stop",
        "length",
    }
    assert len(late) == len(LENGTHS) + (halfway != "one_dropped")


@pytest.mark.vllm
def test_a_look_at_running_requests_sees_all_tokens(made: dict[str, Any]) -> None:
    by, so_far = made["looked_at"][0]["halfway"]
    assert so_far["0"] > HALFWAY / 2
    assert len(by["0"][0]) == len(by["0"][1]) == so_far["0"]


@pytest.mark.vllm
def test_most_tokens_are_noted(made: dict[str, Any]) -> None:
    own = [s for name, samples in made["tokens"].items() if name not in ("halfway", "5") for s in samples]
    assert sum(len(ids) for ids, *_ in own) > 100
    others = len(made["tokens"]["5"][0][0])
    assert made["vllm's"] <= 2 * len(own) + others + 3  # first and last of each, and chunks of the longest prompt


@pytest.mark.vllm
@pytest.mark.parametrize(("how", "plain"), [({}, True), ({"stop": ["w7"], "detokenize": True}, False)])
def test_text_that_ends_a_request_is_looked_for_after_every_token(how: dict[str, Any], plain: bool) -> None:
    compat.import_vllm()
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.request import Request

    params = compat.sampling_params(**OUTPUT | how, max_tokens=9, output_kind=RequestOutputKind.FINAL_ONLY)
    assert late_output._is_plain(Request("a", [5], params, None)) == plain


@pytest.mark.parametrize("name", ["routed_experts", "aux_output_connector_output"])
def test_what_comes_beside_the_tokens_goes_vllms_way(name: str) -> None:
    """Two versions' names of the experts that every token went to."""
    seen: list[Any] = []
    scheduler = SimpleNamespace(update_from_output=lambda *both: seen.append(both) or {}, requests={})
    scheduled = SimpleNamespace(num_scheduled_tokens={"a": 1}, scheduled_spec_decode_tokens={})
    sampled = SimpleNamespace(logprobs=SimpleNamespace(cu_num_generated_tokens=None), **{name: {"a": object()}})
    assert LateOutput(scheduler, None, 1)(scheduled, sampled) == {}
    assert seen == [(scheduled, sampled)]
