"""The trainer's end of a connection, against a server in a process that is stopped."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import zmq.asyncio

from lightrl.engines import secure
from lightrl.engines.staging import Shipment
from lightrl.pools.client import EngineClient, EngineLostError
from lightrl.weights.source import HeldWeights
from tests.helpers.served import SPEC

SERVER = """
import sys
from lightrl.engines.server import EngineServer
from tests.helpers.served import FakeEngine

server = EngineServer(sys.argv[1], sys.argv[2])
server._engine = FakeEngine()
print("up", flush=True)
server.serve()
"""


async def seconds_until_lost(address: str, token: str, pid: int) -> float:
    context = zmq.asyncio.Context()
    client = EngineClient(context, address, token)
    try:
        await client.configure(SPEC, 0)
        await client.ping()
        os.kill(pid, signal.SIGSTOP)
        stopped = time.monotonic()
        weights = HeldWeights([("w", torch.zeros(2**20))])
        with pytest.raises(EngineLostError, match="the connection ended"):
            await asyncio.wait_for(client.ship(Shipment(weights, 1, recompute_kv=True)), 20)
        return time.monotonic() - stopped
    finally:
        client.close()
        context.term()


@pytest.mark.slow
def test_a_stopped_engine_is_lost_in_seconds_although_a_push_waits_to_be_read(tmp_path: Path) -> None:
    """Weights that fill the connection must not hide that nobody answers on it."""
    address, token = f"ipc://{tmp_path}/e.sock", secure.new_token()
    server = subprocess.Popen([sys.executable, "-c", SERVER, address, token], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        assert server.stdout.readline() == "up\n"
        assert asyncio.run(seconds_until_lost(address, token, server.pid)) < 8
    finally:
        server.kill()
        server.communicate()
