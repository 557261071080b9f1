"""A real server around an engine that is none, on a thread, and clients of it."""

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import zmq
from zmq.utils.monitor import recv_monitor_message

from lightrl.engines import messages, secure, server
from lightrl.engines.messages import (
    Configure,
    EngineSpec,
    Push,
    Ready,
    Request,
    TensorMeta,
)

TOKEN = "a token that only the trainer knows"
SPEC = EngineSpec(config={}, dtype="float32")
HANDSHAKE_SECONDS = 1.0


class FakeEngine:
    """Stands where vLLM would: everything before it is real."""

    busy = False
    device = "cpu"

    def __init__(self) -> None:
        self.spec, self.loaded, self.submitted, self.closed = SPEC, [], [], False
        self.fault: Exception | None = None

    def submit(self, request: Request) -> None:
        if not request.prompt:
            raise ValueError("the prompt is empty")
        self.submitted.append(request.id)

    def score(self, sequences: list[list[int]]) -> list[torch.Tensor]:
        return [torch.zeros(len(s) - 1) for s in sequences]

    def load(self, weights: Any, version: int, recompute_kv: bool) -> float:
        if self.fault:
            raise self.fault
        self.loaded.append((version, {name: tensor.tolist() for name, tensor in weights}))
        return 0.0

    def abort(self, ids: list[str]) -> None: ...

    def abort_all(self) -> None:
        self.submitted.clear()

    def close(self) -> None:
        self.closed = True


class Served:
    """A server on a thread, and clients of it."""

    def __init__(self, token: str = TOKEN) -> None:
        self.token = token
        self.server = server.EngineServer("tcp://127.0.0.1:0", token)
        self.address = self.server.address
        self.port = int(self.address.rpartition(":")[2])
        self.engine = self.server._engine = FakeEngine()
        self.error: Exception | None = None
        self.context, self.clients = zmq.Context(), []
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self) -> None:
        try:
            self.server.serve()
        except Exception as error:
            self.error = error

    def client(self, make: Callable[[Any], Any] | None = None) -> "Client":
        socket = make(self.context) if make else secure.client_socket(self.context, self.token)
        self.clients.append(Client(socket, self.address))
        return self.clients[-1]

    def trainer(self) -> "Client":
        client = self.client()
        client.send(Configure(SPEC))
        assert client.receive() == Ready(os.getpid())
        return client

    def close(self) -> None:
        self.server._stopped = True
        self.thread.join(5)
        for client in self.clients:
            client.close()
        self.context.term()


class Client:
    def __init__(self, socket: Any, address: str) -> None:
        self.socket, self.monitor = socket, socket.get_monitor_socket()
        socket.connect(address)

    def send(self, *parts: Any) -> None:
        self.socket.send_multipart([p if isinstance(p, bytes) else messages.encode(p) for p in parts], copy=False)

    def receive(self, seconds: float = 5.0) -> Any:
        return messages.from_engine(self.socket.recv_multipart()[0]) if self.socket.poll(1000 * seconds) else None

    def close(self) -> None:
        if not self.socket.closed:
            self.socket.disable_monitor()
            self.monitor.close(0)
            self.socket.close(0)

    def see(self, events: int, seconds: float = 5.0) -> bool:
        """Whether the connection comes to one of these events in time."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if self.monitor.poll(1000 * left) and recv_monitor_message(self.monitor)["event"] & events:
                return True
        return False


def push(*shapes: list[int], dtype: str = "float32") -> Push:
    return Push(1, [TensorMeta(f"w{i}", dtype, shape) for i, shape in enumerate(shapes)], recompute_kv=True)
