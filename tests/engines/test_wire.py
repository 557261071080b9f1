"""What travels: any bytes are a message or a clean error."""

import contextlib
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import DecodeError, msgpack

from lightrl.engines import messages
from lightrl.engines.messages import (
    Abort,
    Chunk,
    Configure,
    EngineSpec,
    Failed,
    FromTrainer,
    Generate,
    Output,
    Ping,
    Request,
    Score,
    Stop,
)
from tests.helpers.served import Served, push

wire = st.one_of(
    st.binary(max_size=200),
    st.recursive(st.none() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=8), st.lists, max_leaves=20).map(
        msgpack.encode
    ),
    st.builds(
        lambda name, body: msgpack.encode({"type": name} | body),
        st.sampled_from(["Configure", "Generate", "Abort", "Push", "Chunk", "Score", "Ping", "Stop", "Ready", ""]),
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
    Ping(),
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
