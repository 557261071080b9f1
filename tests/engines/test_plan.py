"""Pushes by plan: a real vLLM in the layout that it has on GPUs."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightrl.engines import compat
from lightrl.engines.base import WeightSyncError
from lightrl.engines.loader import Loader
from lightrl.engines.plan import Copies, CopyPlan
from lightrl.engines.staging import Shipment, Staging
from lightrl.engines.vllm import VLLMEngine
from lightrl.weights.source import HeldWeights, PolicyWeights
from tests.helpers.fits import BAR, cleaned_up
from tests.helpers.tiny import by_hand, tiny_model

SEQUENCES = [[5, 6, 7, 8, 9, 10], [11, 4, 3]]


class OneByOne(PolicyWeights):
    """Weights that are made while they are sent, as those of a sharded policy are."""

    def held(self) -> None:
        return None


@pytest.fixture
def plain_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU vLLM packs its matrices while it loads them; on GPUs it leaves them as they are."""
    compat.import_vllm()
    from vllm.model_executor.layers import utils

    def unpacked(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = nn.functional.linear

    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", unpacked)


@contextmanager
def engine_of(model: Any, store: Path) -> Iterator[VLLMEngine]:
    with cleaned_up():
        dist.init_process_group("gloo", init_method=f"file://{store}/store", rank=0, world_size=1)
        engine = VLLMEngine(model, local_rank=0, device=torch.device("cpu"), dtype=torch.float32, max_model_len=64)
        try:
            yield engine
        finally:
            engine.close()


def gap(engine: VLLMEngine, model: Any) -> float:
    """Largest |difference| of logprobs."""
    found = engine.score(SEQUENCES)
    return max(float((f - by_hand(model, s[:1], s[1:])).abs().max()) for f, s in zip(found, SEQUENCES, strict=True))


def changed(model: Any) -> None:
    """As an optimizer would: in place."""
    for i, p in enumerate(model.parameters()):
        p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))


@torch.no_grad()
@pytest.mark.vllm
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", [PolicyWeights, OneByOne])
def test_every_push_arrives(plain_layout: None, tmp_path: Path, tied: bool, kind: type[PolicyWeights]) -> None:
    model = tiny_model(tied=tied)
    with engine_of(model, tmp_path) as engine:
        engine._loader._reload = lambda pairs: pytest.fail("reloaded")
        weights = kind(model, torch.float32)
        for moves in (None, None, model.model.norm.weight, compat.model_of(engine.llm).model.norm.weight, None):
            if moves is not None:  # the copies that a push begins with go to or come from memory that is used no more
                moves.data = moves.data.clone()
            changed(model)
            engine.load_weights(weights)
            assert gap(engine, model) < BAR
        replaced = tiny_model(1, tied=tied)  # other memory, as after a checkpoint was loaded
        engine.load_weights(kind(replaced, torch.float32))
        assert gap(engine, replaced) < BAR


@torch.no_grad()
@pytest.mark.vllm
def test_faults_are_named(plain_layout: None, tmp_path: Path) -> None:
    model = tiny_model()
    with engine_of(model, tmp_path) as engine:
        engine.load_weights(PolicyWeights(model, torch.float32))
        pairs = list(PolicyWeights(model, torch.float32))
        with pytest.raises(WeightSyncError, match=r"^model\.norm\.weight was not sent"):
            engine.load_weights(HeldWeights([p for p in pairs if p[0] != "model.norm.weight"]))
        with pytest.raises(WeightSyncError, match="'other' was sent"):
            engine.load_weights(HeldWeights([*pairs, ("other", torch.ones(2))]))
        dict(pairs)["model.norm.weight"][0] = torch.nan  # a push does not judge what it carries
        engine.load_weights(PolicyWeights(model, torch.float32))
        moved = compat.model_of(engine.llm).model.norm.weight
        moved.data = torch.zeros_like(moved)
        dict(pairs)["model.norm.weight"][0] = 1.0
        engine.load_weights(
            PolicyWeights(model, torch.float32)
        )  # a plan for the old addresses would write into nothing
        assert gap(engine, model) < BAR


@pytest.mark.vllm
def test_packed_matrices_have_no_plan(tmp_path: Path) -> None:
    model = tiny_model()
    with engine_of(model, tmp_path) as engine:
        inner = compat.model_of(engine.llm)
        assert CopyPlan.record(inner, PolicyWeights(model, torch.float32).outline()) is None


class Layer(nn.Module):
    """Loads two halves into one parameter, as vLLM's layers do."""

    def __init__(self, load: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 3), requires_grad=False)
        self.load = load

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self.load(self.weight.data[:2] if name == "a" else self.weight.data[2:], tensor)


LOADS: dict[str, tuple[Any, bool]] = {
    "a copy": (lambda place, tensor: place.copy_(tensor), True),
    "a copy of the turned tensor": (lambda place, tensor: place.copy_(tensor.flip(0).flip(0)), False),
    "a copy of a part": (lambda place, tensor: place[:1].copy_(tensor[:1]), False),
    "a sum": (lambda place, tensor: place.copy_(tensor + 1), False),
    "an error": (lambda place, tensor: place.no_such_method(), False),
}


@pytest.mark.parametrize("how", LOADS)
def test_what_is_more_than_copying_has_no_plan(how: str) -> None:
    load, plain = LOADS[how]
    layer = Layer(load)
    sent = HeldWeights([("a", torch.ones(2, 3)), ("b", torch.full((2, 3), 2.0))])
    plan = CopyPlan.record(layer, sent.outline())
    assert (plan is not None) == plain
    assert not layer.weight.any(), "recording wrote to the engine"
    if plan is not None:
        plan.copy(sent)
        assert layer.weight[:, 0].tolist() == [1, 1, 2, 2]


def test_a_quantised_engine_reloads() -> None:
    layer = Layer(LOADS["a copy"][0])
    layer.quant_method = object()
    reloaded: list[str] = []
    sent = HeldWeights([("a", torch.ones(2, 3)), ("b", torch.ones(2, 3))])
    Loader(layer, 0, lambda pairs: reloaded.extend(name for name, _ in pairs)).load(sent)
    assert reloaded == ["a", "b"]


def never(_: Any) -> None:
    raise AssertionError("reloaded")


def test_a_push_that_came_by_wire_is_not_kept() -> None:
    layer = Layer(LOADS["a copy"][0])
    loader = Loader(layer, 0, never)
    for value in (1.0, 2.0):
        shipment = Shipment(HeldWeights([(name, torch.full((2, 3), value)) for name in "ab"]), 0, recompute_kv=True)
        staging = Staging(shipment.push)
        staging.add(0, bytes(shipment._buffer.numpy()))
        buffer = weakref.ref(staging._buffer)
        loader.load(staging.weights())
        del staging
        gc.collect()
        assert buffer() is None
        assert layer.weight.unique().tolist() == [value]


def test_weights_that_do_not_lie_in_order_arrive_at_every_push() -> None:
    policy, layer = nn.Module(), Layer(LOADS["a copy"][0])
    policy.a, policy.b = nn.Parameter(torch.ones(3, 2).t()), nn.Parameter(torch.ones(2, 3))
    loader, weights = Loader(layer, 0, never), PolicyWeights(policy, torch.float32)
    for value in (1.0, 2.0, 3.0):
        with torch.no_grad():
            policy.a.fill_(value)
        loader.load(weights)
        assert layer.weight[:2].unique().tolist() == [value]


def test_a_copy_that_did_not_arrive_is_named() -> None:
    sources, places = [torch.ones(3, 100), torch.ones(5)], [torch.zeros(3, 100), torch.zeros(5)]
    copies = Copies(["matrix", "vector"], sources, places)
    copies.run()
    copies._places = [torch.zeros(3, 100), places[1]]
    sources[0].fill_(2)
    with pytest.raises(WeightSyncError, match="sent as matrix$"):
        copies.run()
