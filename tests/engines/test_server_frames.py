"""What a server sends fits in a frame, however much ends at once."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import zmq.asyncio

from lightrl.engines.messages import EngineSpec, Output, Request
from lightrl.engines.server import EngineServer
from lightrl.pools.client import EngineClient

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


def test_completions_that_end_together_need_not_fit_in_one_frame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightrl.engines.secure.MAX_FRAME_BYTES", 100_000)
    address = f"ipc://{tmp_path}/e.sock"
    server = EngineServer(address, TOKEN)
    server._engine = Engine(40_000)
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    outputs = asyncio.run(sampled(address, 4))
    thread.join(5)
    server.close()
    assert [len(o.logprobs) for o in outputs] == [40_000] * 4
