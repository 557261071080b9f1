"""Who has the token can send nonsense, but not break the server."""

import logging
import time
from typing import Any

import psutil
import pytest
import torch
import zmq
from msgspec import msgpack

from lightrl.engines import messages, secure
from lightrl.engines.messages import (
    Abort,
    Chunk,
    Configure,
    EngineSpec,
    Failed,
    Generate,
    Loaded,
    Ready,
    Request,
    Score,
    Scored,
    Stop,
)
from lightrl.engines.staging import Shipment
from lightrl.weights.source import HeldWeights
from tests.helpers.served import SPEC, Served, push

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
    for parts in Shipment(HeldWeights([("w", torch.tensor([1.0, 2.0]))]), 5, recompute_kv=True).frames():
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


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        (EngineSpec({}, "float32", code_path="/tmp/model"), "code_path"),
        (EngineSpec({}, "float32", engine_args={"worker_extension_cls": "os.Evil"}), "worker_extension_cls"),
        (EngineSpec({}, "float32", engine_args={"max_num_seqs": 8, "model": "/tmp/model"}), "model"),
    ],
)
def test_without_a_token_nobody_has_it_run_code(spec: EngineSpec, named: str) -> None:
    """On a loopback address any user of the host can connect."""
    served = Served(secure.LOOPBACK_TOKEN)
    try:
        served.server._engine.spec = spec  # it would stand already
        client = served.client()
        client.send(Configure(spec))
        answer = client.receive()
        assert isinstance(answer, Failed)
        assert named in answer.reason
        assert "LIGHTRL_TOKEN" in answer.reason
        served.server._engine.spec = SPEC
        served.trainer()  # is answered Ready
    finally:
        served.close()
