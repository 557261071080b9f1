"""A hostile world around an engine's socket: who has no token is refused, and the trainer is served."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from lightrl.engines import secure, server
from lightrl.engines.messages import (
    Configure,
    Score,
    Scored,
    Stop,
)
from tests.helpers.served import HANDSHAKE_SECONDS, SPEC, TOKEN, Served

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
