"""Frames: what a server sends fits in one, however much ends at once; what it is sent in many holds nothing up."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq.asyncio

from lightrl.engines.messages import EngineSpec, Output, Request
from lightrl.engines.server import EngineServer
from lightrl.engines.staging import Shipment, Staging
from lightrl.pools.client import EngineClient
from lightrl.weights.source import HeldWeights

TOKEN = "a token of some length"


class Engine:
    """Ends all requests in one step, each with ``size`` bytes of logprobs."""

    spec = EngineSpec({}, "float32")

    def __init__(self, size: int) -> None:
        self.size, self.requests = size, list[Request]()

    @property
    def busy(self) -> bool:
        return bool(self.requests)

    def submit(self, request: Request) -> None:
        self.requests.append(request)

    def step(self) -> list[Output]:
        done, self.requests = self.requests, []
        return [Output(r.id, [], bytes(self.size), [], truncated=True) for r in done]

    def load(self, weights: Any, version: int, recompute_kv: bool) -> float:
        return 0.0

    def abort_all(self) -> None:
        self.requests = []

    def close(self) -> None:
        return None


async def sampled(address: str, count: int) -> list[Any]:
    context = zmq.asyncio.Context()
    client = EngineClient(context, address, TOKEN)
    try:
        await client.configure(Engine.spec, 0)
        futures = client.generate([Request(str(i), [1], 1) for i in range(count)])
        return await asyncio.wait_for(asyncio.gather(*futures), 20)
    finally:
        client.stop()
        client.close(linger_ms=500)
        context.term()


@contextmanager
def serving(engine: Any, address: str) -> Iterator[None]:
    server = EngineServer(address, TOKEN)
    server._engine = engine
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    yield
    thread.join(5)
    server.close()


def test_completions_that_end_together_need_not_fit_in_one_frame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightrl.engines.secure.MAX_FRAME_BYTES", 100_000)
    address = f"ipc://{tmp_path}/e.sock"
    with serving(Engine(40_000), address):
        outputs = asyncio.run(sampled(address, 4))
    assert [len(o.logprobs) for o in outputs] == [40_000] * 4


class Endless(Engine):
    """Steps for ever, slowly."""

    busy, device = True, "cpu"
    steps = 0

    def step(self) -> list[Output]:
        self.steps += 1
        return []


async def shipped(address: str, shipment: Shipment) -> None:
    context = zmq.asyncio.Context()
    client = EngineClient(context, address, TOKEN)
    try:
        await client.configure(Engine.spec, 0)
        await asyncio.wait_for(client.ship(shipment), 20)
    finally:
        client.stop()
        client.close(linger_ms=500)
        context.term()


def test_generation_goes_on_between_the_pieces_of_a_push(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightrl.engines.staging.CHUNK_BYTES", 4096)
    address, engine, steps = f"ipc://{tmp_path}/e.sock", Endless(0), list[int]()
    add = Staging.add

    def slow(self: Staging, offset: int, data: Any) -> None:
        time.sleep(0.01)  # the next one waits already
        steps.append(engine.steps)
        add(self, offset, data)

    monkeypatch.setattr(Staging, "add", slow)
    with serving(engine, address):
        asyncio.run(shipped(address, Shipment(HeldWeights([("w", torch.zeros(20 * 1024))]), 1, recompute_kv=True)))
    assert len(steps) == 20
    assert all(later > before for before, later in zip(steps, steps[1:], strict=False))


def test_a_server_outlives_a_trainer_that_went_before_its_completions_ended(tmp_path: Path) -> None:
    server, engine = EngineServer(f"ipc://{tmp_path}/e.sock", TOKEN), Engine(8)
    engine.requests = [Request(str(i), [1], 1) for i in range(3)]
    server._engine, server._trainer = engine, b"gone"
    server._turn()
    assert server._trainer is None
    server._send_frame(b"a page of prompts", b"gone")
    server.close()
