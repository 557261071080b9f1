"""Optimizer state that waits on the host comes back as it was."""

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from lightrl import offload
from lightrl.offload import StateOffload
from lightrl.optim import make_optimizer
from lightrl.sharding import shard
from tests.helpers.tiny import tiny_model
from tests.helpers.training import quiet_trainer, tiny_data, tiny_module

CPU = torch.device("cpu")


def trained(steps: int, name: str = "adamw", between: Any = lambda optimizers: None) -> Any:
    """Return an optimizer that took steps on large and small tensors."""
    model = tiny_model()
    optimizer = make_optimizer([(model.parameters(), 1e-3)], betas=(0.9, 0.99), weight_decay=0.1, name=name)
    for step in range(steps):
        for i, p in enumerate(model.parameters()):
            p.grad = torch.full_like(p, 0.1 * (i + 1) * (-1) ** step) + p.detach()
        optimizer.step()
        between([optimizer])
    return optimizer


def state_of(optimizer: Any) -> list[torch.Tensor]:
    return [shard(v) for s in optimizer.state.values() for v in s.values() if v.ndim]


@pytest.mark.parametrize("piece", [2**30, 100_000], ids=["in one piece", "in several"])
def test_steps_are_the_same_and_the_host_memory_is_kept(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "_PIECE_BYTES", piece)
    held, places = StateOffload(), []

    def out_and_back(optimizers: Any) -> None:
        held.out(optimizers)
        assert held.is_out
        places.append([t.data_ptr() for t in state_of(optimizers[0])])
        assert all(place % 16 == 0 for place in places[-1])
        held.back(optimizers, CPU)
        assert not held.is_out
        assert not {t.data_ptr() for t in state_of(optimizers[0])} & set(places[-1])

    found, right = state_of(trained(3, between=out_and_back)), state_of(trained(3))
    assert len(found) == len(right) > 20
    assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))
    assert places[0] == places[1] == places[2]
    pieces = {t.untyped_storage().data_ptr() for t in held._host}
    assert (len(pieces) == 1) == (piece == 2**30)


def test_shards_stay_shards() -> None:
    trainer = quiet_trainer(max_steps=1)
    trainer.fit(tiny_module(lr=1e-2), tiny_data())
    (optimizer,) = trainer.optimizers
    values = [v for s in optimizer.state.values() for v in s.values() if v.ndim]
    assert all(isinstance(v, DTensor) for v in values)
    before = [v.full_tensor() for v in values]
    held = StateOffload()
    held.out([optimizer])
    assert {t.data_ptr() for t in state_of(optimizer)} == {t.data_ptr() for t in held._host}
    held.back([optimizer], CPU)
    after = [v for s in optimizer.state.values() for v in s.values() if v.ndim]
    for old, new, value in zip(values, after, before, strict=True):
        assert isinstance(new, DTensor)
        assert (new.placements, new.device_mesh, new.shape) == (old.placements, old.device_mesh, old.shape)
        assert torch.equal(new.full_tensor(), value)
    optimizer.step()


def test_a_state_that_has_become_another_gets_memory_of_its_own() -> None:
    held = StateOffload()
    held.out([])
    held.back([], CPU)
    first, second = trained(1), trained(2)
    for optimizers in ([first], [first, second], [second]):
        right = [t.clone() for o in optimizers for t in state_of(o)]
        held.out(optimizers)
        held.back(optimizers, CPU)
        found = [t for o in optimizers for t in state_of(o)]
        assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


def test_state_that_has_its_own_place_is_left_alone() -> None:
    optimizer = trained(1, "adamw_offload")
    places = [t.data_ptr() for t in state_of(optimizer)]
    held = StateOffload()
    held.out([optimizer])
    assert [t.data_ptr() for t in state_of(optimizer)] == places
    held.back([optimizer], CPU)
    assert [t.data_ptr() for t in state_of(optimizer)] == places


def test_without_page_locked_memory_the_other_kind_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, empty = [], torch.empty

    def refusing(*size: Any, pin_memory: bool = False, **how: Any) -> torch.Tensor:
        asked.append(pin_memory)
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*size, **how)

    class OnGPU:
        is_cuda, nbytes, dtype, shape = True, 12, torch.float32, (3,)

    monkeypatch.setattr(torch, "empty", refusing)
    (memory,) = offload._host_memory([OnGPU()])  # type: ignore[list-item]
    assert asked == [True, False]
    assert (memory.dtype, memory.shape) == (torch.float32, (3,))


@pytest.mark.gpu
def test_on_a_gpu_the_memory_is_free_meanwhile_and_the_hosts_is_page_locked() -> None:
    model = tiny_model().cuda()
    optimizer = make_optimizer([(model.parameters(), 1e-2)], betas=(0.9, 0.99), weight_decay=0.0)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    right, taken = [t.cpu() for t in state_of(optimizer)], torch.cuda.memory_allocated()
    held = StateOffload()
    for _ in range(2):
        held.out([optimizer])
        assert taken - torch.cuda.memory_allocated() >= sum(t.nbytes for t in right)
        assert all(t.is_pinned() for t in state_of(optimizer))
        held.back([optimizer], torch.device("cuda", 0))
        assert all(t.is_cuda for t in state_of(optimizer))
        assert all(torch.equal(a.cpu(), b) for a, b in zip(state_of(optimizer), right, strict=True))
    optimizer.step()
