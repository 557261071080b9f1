"""An engine that is told of a push begins no step before it comes; but it does not wait for one that never does."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq.asyncio

from lightrl.engines import server
from lightrl.engines.messages import Loaded, Request
from lightrl.engines.staging import Shipment
from lightrl.pools.client import EngineClient
from lightrl.weights.source import HeldWeights
from tests.engines.test_server_frames import TOKEN, Endless, serving


class Noting(Endless):
    """Notes when it steps and loads; a step takes 2 ms."""

    def __init__(self) -> None:
        super().__init__(0)
        self.stepped: list[float] = []
        self.loaded: list[float] = []

    def step(self) -> list[Any]:
        self.stepped.append(time.perf_counter())
        time.sleep(0.002)
        return []

    def load_shared(self, push: Any) -> float:
        self.loaded.append(time.perf_counter())
        return 0.001

    def between(self, since: float, until: float) -> int:
        return sum(since < t < until for t in self.stepped)


def while_it_steps(tmp_path: Path, engine: Noting, what: Callable[[EngineClient], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        context = zmq.asyncio.Context()
        client = EngineClient(context, address, TOKEN)
        try:
            await client.configure(Noting.spec, 0)
            await asyncio.sleep(0.1)
            return await asyncio.wait_for(what(client), 20)
        finally:
            client.stop()
            client.close(linger_ms=500)
            context.term()

    address = f"ipc://{tmp_path}/e.sock"
    with serving(engine, address):
        return asyncio.run(run())


def shared(version: int) -> Shipment:
    """A push of weights that would lie in the trainer's memory."""
    shipment = Shipment(HeldWeights([("w", torch.zeros(2))]), version, recompute_kv=True)
    shipment.frames = lambda: iter([[server.messages.encode(message(version))]])  # type: ignore[method-assign]
    return shipment


def message(version: int) -> Any:
    memory = server.messages.SharedMemory(b"", 8, 0, b"", 0, b"", wait=False, gpu="")
    return server.messages.Push(version, [], True, memory)


def test_no_step_is_under_way_when_the_push_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_HOLD_SECONDS", 10.0)
    engine = Noting()

    async def pushed(client: EngineClient) -> Loaded:
        client.hold()
        client.generate([Request("1", [5], 4)])  # what else it is sent does not end it
        await asyncio.sleep(0.3)
        loaded = await client.ship(shared(7))
        await asyncio.sleep(0.1)
        return loaded

    loaded = while_it_steps(tmp_path, engine, pushed)
    (at,) = engine.loaded
    assert loaded.version == 7
    assert engine.between(at - 0.25, at) == 0
    assert engine.between(at - 10, at - 0.25) > 5
    assert engine.between(at, at + 10) > 5
    assert 0.25 < loaded.seconds < 5, "what generation stood still for it counts"


def test_a_push_that_does_not_come_is_not_waited_for(tmp_path: Path) -> None:
    engine = Noting()

    async def nothing(client: EngineClient) -> None:
        client.hold()
        await asyncio.sleep(0.5)

    while_it_steps(tmp_path, engine, nothing)
    gaps = [b - a for a, b in zip(engine.stepped, engine.stepped[1:], strict=False)]
    assert max(gaps) > 0.04
    assert sum(g > 0.04 for g in gaps) < len(gaps) / 4


def test_a_push_over_the_wire_ends_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_HOLD_SECONDS", 10.0)
    engine = Noting()

    async def pushed(client: EngineClient) -> Loaded:
        client.hold()
        await asyncio.sleep(0.1)
        loaded = await client.ship(Shipment(HeldWeights([("w", torch.zeros(2))]), 3, recompute_kv=True))
        engine.loaded.append(time.perf_counter())
        await asyncio.sleep(0.1)
        return loaded

    assert while_it_steps(tmp_path, engine, pushed).version == 3
    (at,) = engine.loaded
    assert engine.between(at, at + 10) > 5
