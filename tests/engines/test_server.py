"""A hostile world around an engine's socket: who has no token is refused, who has one cannot break it."""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import DecodeError, msgpack
from zmq.utils.monitor import recv_monitor_message

from lightrl.engines import messages, secure, server
from lightrl.engines.messages import (
    Abort,
    Chunk,
    Configure,
    EngineSpec,
    Failed,
    FromTrainer,
    Generate,
    Loaded,
    Output,
    Push,
    Ready,
    Request,
    Score,
    Scored,
    Stop,
    TensorMeta,
)
from lightrl.engines.staging import Shipment

TOKEN = "a token that only the trainer knows"
SPEC = EngineSpec(config={}, dtype="float32")
HANDSHAKE_SECONDS = 1.0


class FakeEngine:
    """Stands where vLLM would: everything before it is real."""

    busy = False

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

    def __init__(self) -> None:
        self.server = server.EngineServer("tcp://127.0.0.1:0", TOKEN)
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
        socket = make(self.context) if make else secure.client_socket(self.context, TOKEN)
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


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(secure, "_HANDSHAKE_MS", int(1000 * HANDSHAKE_SECONDS))
    served = Served()
    yield served
    served.close()
    assert not served.thread.is_alive()
    assert served.engine.closed


# -- without the token -------------------------------------------------------------------------------------------------

FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
) | zmq.EVENT_DISCONNECTED


def no_token(context: Any) -> Any:
    return context.socket(zmq.DEALER)


def wrong_token(context: Any) -> Any:
    return secure.client_socket(context, TOKEN + "?")


def key_of_its_own(context: Any) -> Any:
    stranger = secure.client_socket(context, TOKEN)  # knows the engine's public key, which is no secret of its own
    stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
    return stranger


def plain_password(context: Any) -> Any:
    stranger = context.socket(zmq.DEALER)
    stranger.plain_username, stranger.plain_password = b"trainer", TOKEN.encode()
    return stranger


@pytest.mark.parametrize("stranger", [no_token, wrong_token, key_of_its_own, plain_password])
def test_a_stranger_is_refused_and_the_trainer_is_served(
    served: Served, stranger: Callable[[Any], Any], caplog: pytest.LogCaptureFixture
) -> None:
    trainer = served.trainer()
    client = served.client(stranger)
    client.send(Configure(SPEC))
    client.send(Stop())
    assert client.see(FAILED)
    assert client.receive(0.3) is None
    trainer.send(Score([[1, 2]]))
    assert isinstance(trainer.receive(), Scored)
    if stranger is key_of_its_own:  # the others do not come as far as the doorman
        assert "refused a client whose key does not come from this engine's token" in caplog.text


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
CURVE_GREETING = GREETING.replace(b"NULL", b"CURVE")[:64]
RAW = {
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "noise": bytes(range(256)) * 64,
    "half a greeting": GREETING[:13],
    "a NULL greeting and a frame of 1 GB": GREETING + b"\x02" + (2**30).to_bytes(8, "big") + bytes(2**16),
    "a CURVE greeting and a command of 1 GB": CURVE_GREETING + b"\x06" + (2**30).to_bytes(8, "big") + bytes(2**16),
    "a CURVE greeting and a false hello": CURVE_GREETING + b"\x04\xc8\x05HELLO" + bytes(194),
    "half a hello": CURVE_GREETING + b"\x04\xc8\x05HELLO" + bytes(20),
    "nothing": b"",
}


def closed_by_peer(raw: socket.socket, seconds: float) -> bool:
    raw.settimeout(seconds)
    try:
        while raw.recv(4096):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


@pytest.mark.parametrize("data", RAW.values(), ids=RAW)
def test_raw_bytes_are_cut_off_and_the_trainer_is_served(served: Served, data: bytes) -> None:
    trainer = served.trainer()
    with socket.create_connection(("127.0.0.1", served.port)) as raw:
        raw.sendall(data)
        trainer.send(Score([[1, 2]]))
        assert isinstance(trainer.receive(), Scored)
        assert closed_by_peer(raw, HANDSHAKE_SECONDS + 3)
    trainer.send(Score([[1, 2]]))
    assert isinstance(trainer.receive(), Scored)


def test_a_crowd_that_says_nothing_does_not_keep_the_trainer_out(served: Served) -> None:
    crowd = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(200)]
    try:
        served.trainer()
        assert all(closed_by_peer(raw, HANDSHAKE_SECONDS + 3) for raw in crowd)
    finally:
        for raw in crowd:
            raw.close()


# -- with the token ----------------------------------------------------------------------------------------------------


def push(*shapes: list[int], dtype: str = "float32") -> Push:
    return Push(1, [TensorMeta(f"w{i}", dtype, shape) for i, shape in enumerate(shapes)], recompute_kv=True)


DEEP = b"\x91" * 100_000  # a list in a list in a list ...
BAD: dict[str, tuple[list[list[Any]], str]] = {
    "empty frame": ([[b""]], "none of ours"),
    "garbage": ([[b"\xc1\xff\x00garbage"]], "none of ours"),
    "half a message": ([[messages.encode(Configure(SPEC))[:-4]]], "none of ours"),
    "another type": ([[msgpack.encode([1, 2, 3])]], "none of ours"),
    "unknown tag": ([[msgpack.encode({"type": "Format", "disk": "/"})]], "none of ours"),
    "an answer": ([[Ready(1)]], "none of ours"),
    "a field of another type": ([[msgpack.encode({"type": "Abort", "ids": "all"})]], "none of ours"),
    "a field too few": ([[msgpack.encode({"type": "Push", "version": 1})]], "none of ours"),
    "an integer too large": ([[msgpack.encode({"type": "Chunk", "offset": 2**64 - 1}), b"x"]], "nobody announced"),
    "too deep": ([[b"\x82\xa4type\xa9Configure\xa4spec\x81\xa6config\x81\xa1x" + DEEP]], "none of ours"),
    "a piece nobody announced": ([[Chunk(0), b"1234"]], "nobody announced"),
    "a piece without bytes": ([[push([4])], [Chunk(0)]], "without its bytes"),
    "an empty piece": ([[push([4])], [Chunk(0), b""]], "a piece of 0 bytes"),
    "a piece too long": ([[push([1])], [Chunk(0), b"12345"]], "a piece of 5 bytes at 0 of a push of 4 bytes"),
    "pieces that overlap": ([[push([2])], [Chunk(0), b"1234"], [Chunk(2), b"3456"]], "a piece of 4 bytes at 2"),
    "pieces with a gap": ([[push([2])], [Chunk(4), b"5678"]], "a piece of 4 bytes at 4"),
    "a negative offset": ([[push([2])], [Chunk(-4), b"5678"]], "a piece of 4 bytes at -4"),
    "a negative shape": ([[push([2, -3])]], "'w0' has shape"),
    "two negative sizes": ([[push([-2, -3])]], "'w0' has shape"),
    "an unknown dtype": ([[push([2], dtype="float33")]], "'float33', which torch does not know"),
    "a name of torch that is no dtype": ([[push([2], dtype="Tensor")]], "'Tensor', which torch does not know"),
    "a petabyte": ([[push([2**48])]], "no room for its"),
    "more than 64 bits": ([[push([2**62, 2**62])]], "no room for its"),
    "a push of nothing": ([[push()]], "nothing in it"),
    "a push of empty tensors": ([[push([0], [3, 0])]], "nothing in it"),
    "a request that the engine refuses": ([[Generate([Request("7", [], 4)])]], "request '7': the prompt is empty"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_of_the_trainer_is_answered_and_the_server_goes_on(
    served: Served, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    sends, reason = BAD[case]
    trainer = served.trainer()
    for parts in sends:
        trainer.send(*parts)
    answer = trainer.receive()
    assert isinstance(answer, Failed)
    assert reason in answer.reason
    assert reason in caplog.text
    for parts in Shipment(iter([("w", torch.tensor([1.0, 2.0]))]), 5, recompute_kv=True).frames():
        trainer.send(*(bytes(p) for p in parts))
    assert trainer.receive() == Loaded(5, 0.0)
    assert served.engine.loaded == [(5, {"w": [1.0, 2.0]})]


def test_a_frame_of_1_gb_ends_its_connection_and_the_server_goes_on(served: Served) -> None:
    trainer = served.trainer()
    before = psutil.Process().memory_info().rss
    trainer.send(push([2**28]))
    trainer.send(messages.encode(Chunk(0)), bytes(2**30))
    assert trainer.see(zmq.EVENT_DISCONNECTED, 30)
    trainer.close()
    served.trainer()
    assert served.engine.loaded == []
    deadline = time.monotonic() + 10
    while psutil.Process().memory_info().rss > before + 2**29 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert psutil.Process().memory_info().rss < before + 2**29


def test_before_a_configuration_nothing_is_served(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    client = served.client()
    for message in (Generate([Request("1", [5], 4)]), Score([[1, 2]]), push([2]), Abort(["1"]), Stop()):
        client.send(message)
        assert type(message).__name__ in client.receive().reason
    assert "of a trainer that this engine does not serve" in caplog.text
    assert served.engine.submitted == []
    assert served.thread.is_alive()


def test_a_second_trainer_disturbs_nothing_until_it_takes_over(served: Served) -> None:
    first, second = served.trainer(), served.client()
    first.send(push([1]))
    second.send(Chunk(0), b"1234")
    assert "does not serve" in second.receive().reason
    second.send(Stop())
    assert "does not serve" in second.receive().reason
    first.send(Chunk(0), b"\0\0\x80?")
    assert first.receive() == Loaded(1, 0.0)
    assert served.engine.loaded == [(1, {"w0": [1.0]})]
    first.send(Generate([Request("1", [5], 4)]))
    first.send(Score([[1, 2]]))
    assert isinstance(first.receive(), Scored)
    second.send(Configure(SPEC))
    assert isinstance(second.receive(), Ready)
    assert served.engine.submitted == []  # the first one's
    assert "took this engine over" in first.receive().reason
    first.send(Stop())
    assert "does not serve" in first.receive().reason


def test_a_fault_of_the_engine_ends_the_server_with_its_words(served: Served) -> None:
    served.engine.fault = RuntimeError("boom")
    trainer = served.trainer()
    trainer.send(push([1]))
    trainer.send(Chunk(0), b"1234")
    assert trainer.receive() == Failed("RuntimeError: boom")
    served.thread.join(5)
    assert served.error is served.engine.fault


def test_a_trainer_that_leaves_is_forgotten(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    trainer = served.trainer()
    trainer.send(Generate([Request("1", [5], 4)]))
    trainer.send(Score([[1, 2]]))
    assert isinstance(trainer.receive(), Scored)
    trainer.close()
    time.sleep(0.3)
    served.server._send(Scored([]))  # what an unfinished request would have sent
    assert served.engine.submitted == []
    assert "the trainer is gone" in caplog.text


# -- the wire ----------------------------------------------------------------------------------------------------------

valid = st.one_of(*(st.from_type(t) for t in (Configure, Generate, Abort, Push, Chunk, Score, Stop)))
wire = st.one_of(
    st.binary(max_size=200),
    st.recursive(st.none() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=8), st.lists, max_leaves=20).map(
        msgpack.encode
    ),
    st.builds(
        lambda name, body: msgpack.encode({"type": name} | body),
        st.sampled_from(["Configure", "Generate", "Abort", "Push", "Chunk", "Score", "Stop", "Ready", ""]),
        st.dictionaries(
            st.sampled_from(["spec", "ids", "requests", "version", "tensors", "offset", "sequences"]),
            st.none() | st.integers(-(2**63), 2**63) | st.text(max_size=4) | st.lists(st.integers(0, 9), max_size=3),
        ),
    ),
)


@settings(max_examples=300, deadline=None)
@given(frame=wire)
def test_any_frame_is_a_message_or_a_decode_error(frame: bytes) -> None:
    try:
        message = messages.from_trainer(frame)
    except DecodeError:
        return
    assert isinstance(message, FromTrainer)
    assert messages.from_trainer(messages.encode(message)) == message


@st.composite
def damaged(draw: Any) -> bytes:
    frame = bytearray(messages.encode(draw(st.sampled_from(EXAMPLES))))
    for _ in range(draw(st.integers(1, 4))):
        frame[draw(st.integers(0, len(frame) - 1))] = draw(st.integers(0, 255))
    return bytes(frame[: draw(st.integers(0, len(frame)))] + draw(st.binary(max_size=8)))


EXAMPLES: list[FromTrainer] = [
    Configure(EngineSpec({"vocab_size": 32, "rope": {"theta": 1e6}}, "float32", 64, engine_args={"seed": 1})),
    Generate([Request("1.0.2", [5, 6, 7], 8, 0.7, [2], seed=3)]),
    Abort(["1", "2"]),
    push([2, 3], []),
    Chunk(2**40),
    Score([[1, 2], [3]]),
    Stop(),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_a_message_arrives_as_it_was_sent(message: FromTrainer) -> None:
    assert messages.from_trainer(messages.encode(message)) == message


@settings(max_examples=300, deadline=None)
@given(frame=damaged())
def test_a_damaged_message_is_another_one_or_a_decode_error(frame: bytes) -> None:
    with contextlib.suppress(DecodeError):
        assert isinstance(messages.from_trainer(frame), FromTrainer)


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(frames=st.lists(wire | damaged(), min_size=1, max_size=3))
def test_any_frames_of_a_token_holder_leave_the_server_up(served: Served, frames: list[bytes]) -> None:
    if any(b"Configure" in f for f in frames):
        return  # it may ask for another engine, which takes vLLM
    client = served.client()
    client.send(*frames)
    assert isinstance(client.receive(), Failed)
    client.close()
    assert served.thread.is_alive()


def test_numbers_travel_as_little_endian_float32() -> None:
    assert messages.float_bytes([1.0, -0.5]) == b"\0\0\x80?\0\0\0\xbf"
    assert messages.float_tensor(messages.float_bytes([1.0, -0.5])).tolist() == [1.0, -0.5]
    assert messages.float_tensor(b"").shape == (0,)
    output = Output("1", [5], messages.float_bytes(torch.tensor([0.1])), [(3, 1)], truncated=True)
    assert messages.from_engine(messages.encode(messages.Finished([output]))).outputs == [output]


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "token", "said"),
    [
        ("tcp://0.0.0.0:5555", None, "LIGHTRL_TOKEN is not set"),
        ("tcp://*:5555", None, "LIGHTRL_TOKEN is not set"),
        ("tcp://192.0.2.7:5555", "short", "LIGHTRL_TOKEN has only 5 characters"),
        ("tcp://127.0.0.1:5555", "short", "LIGHTRL_TOKEN has only 5 characters"),
        ("tcp://127.0.0.1:5555", "", "LIGHTRL_TOKEN is not set"),
        ("127.0.0.1:5555", None, "'127.0.0.1:5555' is no engine address: write tcp://HOST:PORT or ipc://PATH"),
        ("tcp://127.0.0.1", None, "is no engine address"),
        ("tcp://127.0.0.1:99999", None, "is no engine address"),
        ("ipc://", None, "is no engine address"),
        ("tcp://127.0.0.1:{used}", None, "cannot listen on tcp://127.0.0.1:"),
    ],
)
def test_what_cannot_be_served_safely_exits_with_2_and_says_why(
    address: str,
    token: str | None,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(secure.TOKEN_VARIABLE, raising=False)
    if token is not None:
        monkeypatch.setenv(secure.TOKEN_VARIABLE, token)
    with socket.create_server(("127.0.0.1", 0)) as used, pytest.raises(SystemExit) as exit_:
        server.main(["--bind", address.format(used=used.getsockname()[1])])
    assert exit_.value.code == 2
    assert said in capsys.readouterr().err


def test_the_server_ends_with_its_parent_and_removes_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    command = [sys.executable, "-u", "-m", "lightrl.engines.server", "--bind", f"ipc://{folder}/engine.sock"]
    code = (
        "import os, subprocess, sys, time\n"
        f"engine = subprocess.Popen({command!r} + ['--parent', str(os.getpid()), '--run-folder', {str(folder)!r}])\n"
        "print('pid', engine.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        lines = iter(parent.stdout.readline, "")
        engine = psutil.Process(int(next(lines).split()[1]))
        assert next(lines) == f"engine listens on ipc://{folder}/engine.sock\n"
        started = time.monotonic()
        parent.send_signal(signal.SIGKILL)
        psutil.wait_procs([engine], timeout=10)
        assert not engine.is_running()
        assert time.monotonic() - started < 5
    assert not folder.exists()
