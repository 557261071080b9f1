"""The engine that servers step: what it refuses leaves it as it was."""

from typing import Any

import pytest
import torch

from lightrl.engines import compat, ending
from lightrl.engines.continuous import ContinuousEngine
from lightrl.engines.messages import EngineSpec, Request
from lightrl.engines.vllm import engine_config, llm_args
from lightrl.partial import completion
from lightrl.weights.source import PolicyWeights
from tests.helpers.fits import cleaned_up
from tests.helpers.tiny import VOCAB, by_hand, tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_requests_that_cannot_be_served_are_value_errors_and_the_engine_goes_on() -> None:
    model = tiny_model()
    compat.import_vllm()
    with cleaned_up(), compat.process_kept():
        engine = ContinuousEngine(EngineSpec(engine_config(model).to_dict(), "float32", 32))
        try:
            for request, said in [
                (Request("a", [], 4), "empty"),
                (Request("b", [5] * 40, 4), "maximum context length is 32"),
                (Request("c", [5], 0), "max_tokens must be at least 1"),
                (Request("d", [5], 4, temperature=-1.0), "temperature must be non-negative"),
                (Request("e", [5, VOCAB], 4), f"token id {VOCAB} is outside the vocabulary of {VOCAB}"),
                (Request("f", [-1], 4), "token id -1 is outside"),
            ]:
                with pytest.raises(ValueError, match=said):
                    engine.submit(request)
                assert not engine.busy
            with pytest.raises(ValueError, match="outside the vocabulary"):
                engine.score([[5, 6], [7, VOCAB]])
            ending._drop_groups()  # as another engine's end does, perhaps the garbage collector's
            assert [len(s) for s in engine.score([[5, 6, 7], [8, 9]])] == [2, 1]
            assert not engine.busy
            engine.submit(Request("g", [5], 4))
            outputs = []
            while engine.busy:
                outputs += engine.step()
            assert [o.id for o in outputs] == ["g"]
        finally:
            engine.close()


def test_requests_with_seeds_sample_the_same_where_a_step_has_no_room_for_all_prompts() -> None:
    model = tiny_model()
    requests = [Request(str(i), [5 + i] * 60, 4, seed=i) for i in range(3)]
    compat.import_vllm()
    with cleaned_up(), compat.process_kept():
        args = {"max_num_batched_tokens": 64}
        engine = ContinuousEngine(EngineSpec(engine_config(model).to_dict(), "float32", 64, engine_args=args))
        try:
            engine.load(PolicyWeights(model, torch.float32), 0, False)
            found = []
            for at_once in (requests, *([r] for r in requests)):
                outputs = {}
                for request in at_once:
                    engine.submit(request)
                while engine.busy:
                    outputs |= {o.id: o.token_ids for o in engine.step()}
                found.append(outputs)
        finally:
            engine.close()
    together, *alone = found
    assert together == {name: tokens for outputs in alone for name, tokens in outputs.items()}
    assert len(together) == 3


@pytest.mark.parametrize("recompute_kv", [True, False])
def test_a_push_in_the_middle_of_a_request(recompute_kv: bool) -> None:
    """Tokens before it are of the old policy, tokens after it of the new; without recomputing they see old states."""
    old, new = tiny_model(0), tiny_model(1)
    compat.import_vllm()
    with cleaned_up(), compat.process_kept():
        engine = ContinuousEngine(EngineSpec(engine_config(old).to_dict(), "float32", 64))
        try:
            engine.load(PolicyWeights(old, torch.float32), 3, recompute_kv)
            engine.submit(Request("long", [4, 5, 6], 40))
            for _ in range(12):
                assert engine.step() == []
            engine.load(PolicyWeights(new, torch.float32), 4, recompute_kv)
            engine.submit(Request("late", [4, 5, 6], 5))
            outputs = [o for _ in range(2) for o in engine.step()]
            so_far = {o.id: completion(o) for o in engine.running()}
            while engine.busy:
                outputs += engine.step()
        finally:
            engine.close()
    found = {o.id: completion(o) for o in outputs}
    versions = found["long"].policy_versions
    part = so_far["long"]
    n = len(part.token_ids)
    assert n > 12
    assert part.token_ids == found["long"].token_ids[:n]
    assert torch.equal(part.logprobs, found["long"].logprobs[:n])
    assert torch.equal(part.policy_versions, versions[:n])
    assert found["late"].policy_versions.unique().tolist() == [4]
    assert versions.unique().tolist() == [3, 4]
    before = versions == 3
    assert 10 <= int(before.sum()) <= 12
    gaps = {
        name: (by_hand(model, [4, 5, 6], found["long"].token_ids) - found["long"].logprobs).abs()
        for name, model in (("old", old), ("new", new))
    }
    assert gaps["old"][before].max() < 1e-4
    assert (gaps["new"][~before].max() < 1e-4) == recompute_kv
    assert gaps["old"][~before].max() > 0.01
    late = by_hand(new, [4, 5, 6], found["late"].token_ids)
    assert (late - found["late"].logprobs).abs().max() < 1e-4  # no prefix of older weights is reused


def test_a_token_under_way_at_a_push_is_of_the_old_policy() -> None:
    """On a GPU the next step runs before the last one's tokens are looked at; on a CPU that is said by hand."""
    model = tiny_model()
    model.config.eos_token_id = None
    compat.import_vllm()
    with cleaned_up(), compat.process_kept():
        engine = ContinuousEngine(EngineSpec(engine_config(model).to_dict(), "float32", 64))
        try:
            engine.load(PolicyWeights(model, torch.float32), 3, False)
            engine.submit(Request("a", [4, 5, 6], 20))
            for _ in range(10):
                engine.step()
            (request,) = compat.scheduler_of(engine.llm).requests.values()
            seen = request.num_output_tokens
            request.num_output_placeholders = 1
            engine.load(PolicyWeights(model, torch.float32), 4, False)
            assert engine.running()[0].versions == [(3, seen)]
            request.num_output_placeholders = 0
            outputs = []
            while engine.busy:
                outputs += engine.step()
        finally:
            engine.close()
    assert [o.versions for o in outputs] == [[(3, seen + 1), (4, 20 - seen - 1)]]


@pytest.mark.parametrize(
    ("asked", "largest"),
    [
        ({}, None),
        ({"max_num_seqs": 512}, None),
        ({"max_num_seqs": 1000}, 1000),
        ({"max_num_seqs": 1000, "cudagraph_capture_sizes": [8]}, None),
        ({"max_num_seqs": 1000, "compilation_config": {}}, None),
    ],
)
def test_as_many_requests_as_run_at_once_have_a_graph(asked: dict[str, Any], largest: int | None) -> None:
    assert llm_args("bfloat16", "cuda", asked).get("max_cudagraph_capture_size") == largest
    assert "max_cudagraph_capture_size" not in llm_args("float32", "cpu", asked)
