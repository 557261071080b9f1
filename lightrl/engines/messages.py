"""What trainer and engine processes say to each other: typed msgpack, checked on arrival, never pickle.

A message is one frame; :class:`Chunk` brings a second one, the bytes of weights.
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

MAX_FRAME_BYTES = 2**26
"""A larger frame ends the connection that it came from."""
_HARMLESS_ARGS = frozenset(
    {
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "max_num_seqs",
        "max_num_batched_tokens",
        "enforce_eager",
        "seed",
    }
    | {"async_scheduling", "enable_prefix_caching", "enable_chunked_prefill", "block_size", "swap_space"}
)
CHUNK_BYTES = 2**24
"""Weights travel in pieces of this size, so that generation goes on between them."""


class EngineSpec(Struct, frozen=True):
    """What an engine is built from, on whatever host."""

    config: dict[str, Any]
    """The model's configuration, as ``config.json`` has it."""
    dtype: str
    """Of the engine's weights: ``"float32"``, ``"bfloat16"``."""
    max_model_len: int | None = None
    """Longest prompt + completion in tokens."""
    tensor_parallel_size: int = 1
    engine_args: dict[str, Any] = {}
    """Further arguments of ``vllm.LLM``."""
    code_path: str | None = None
    """Folder or name of a model that brings its own code, which the engine then runs."""

    @property
    def runs_code(self) -> str | None:
        """The argument by which this could have the engine run other code than vLLM's, or None."""
        if self.code_path is not None:
            return "code_path"
        return next((f"engine_args[{name!r}]" for name in self.engine_args if name not in _HARMLESS_ARGS), None)


class Request(Struct, frozen=True):
    """One completion to sample."""

    id: str
    prompt: list[int]
    max_tokens: int
    temperature: float = 1.0
    stop_token_ids: list[int] = []
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None


class Output(Struct, frozen=True):
    """One sampled completion of C tokens."""

    id: str
    token_ids: list[int]
    logprobs: bytes
    """float32 [C], little-endian."""
    versions: list[tuple[int, int]]
    """(policy version, tokens sampled by it), in order; the counts add up to C."""
    truncated: bool


class TensorMeta(Struct, frozen=True):
    """One tensor of a push, under its checkpoint name."""

    name: str
    dtype: str
    shape: list[int]


class SharedMemory(Struct, frozen=True):
    """CUDA memory of the trainer, in the words by which other processes on its host can open it."""

    handle: bytes
    num_bytes: int
    offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    wait: bool
    gpu: str
    """That it lies on, by a name which all processes know it by."""


class Configure(Struct, tag=True, frozen=True):
    """Build this engine, or answer :class:`Ready` if it stands already; work of an earlier trainer is dropped."""

    spec: EngineSpec
    seed: int = 0
    """Of what is sampled without a seed of its own."""


class Generate(Struct, tag=True, frozen=True):
    """Sample these."""

    requests: list[Request]


class Abort(Struct, tag=True, frozen=True):
    """Forget these requests; no output follows."""

    ids: list[str]


class Hold(Struct, tag=True, frozen=True):
    """Begin no step for a moment: a push is about to come, which ends this, and need not wait for a step then."""


class Push(Struct, tag=True, frozen=True):
    """New weights, which lie in ``shared`` or follow in :class:`Chunk` messages; loaded when the last has come."""

    version: int
    tensors: list[TensorMeta]
    recompute_kv: bool
    """Attention states of running requests are computed again under the new weights, or kept."""
    shared: SharedMemory | None = None


class Chunk(Struct, tag=True, frozen=True):
    """The second frame has the bytes from ``offset`` on of all tensors end to end."""

    offset: int


class Score(Struct, tag=True, frozen=True):
    """Give the logprobs of these sequences at temperature 1."""

    sequences: list[list[int]]


class Ping(Struct, tag=True, frozen=True):
    """Answer :class:`Pong` between two steps."""


class Look(Struct, tag=True, frozen=True):
    """Answer with :class:`Running` for each request that runs and has tokens, and then with :class:`Looked`."""


class Ask(Struct, tag=True, frozen=True):
    """Send that page of the prompts that rollouts are wanted of: :class:`Task`."""

    page: int


class Stop(Struct, tag=True, frozen=True):
    """End the process."""


class Ready(Struct, tag=True, frozen=True):
    """The engine stands; it has placeholder weights until the first push."""

    pid: int


class Finished(Struct, tag=True, frozen=True):
    """Completions that ended."""

    outputs: list[Output]


class Loaded(Struct, tag=True, frozen=True):
    """The weights of ``version`` are in and were compared with what was sent."""

    version: int
    seconds: float
    """How long generation stood still."""


class Scored(Struct, tag=True, frozen=True):
    """Answer to :class:`Score`: float32 logprobs, little-endian, of each sequence."""

    logprobs: list[bytes]


class Running(Struct, tag=True, frozen=True):
    """What has been sampled so far of a completion that has not ended."""

    output: Output


class Looked(Struct, tag=True, frozen=True):
    """All that runs was told."""


class Pong(Struct, tag=True, frozen=True):
    """Answer to :class:`Ping`."""


class PromptRow(Struct, frozen=True):
    """See :class:`lightrl.types.Prompt`."""

    token_ids: list[int]
    text: str
    ground_truth: Any
    columns: dict[str, Any]


class Task(Struct, tag=True, frozen=True):
    """Answer to :class:`Ask`: a page of prompts, and how completions of them are sampled."""

    rows: list[PromptRow]
    pages: int
    group_size: int
    max_completion_tokens: int
    temperature: float
    stop_token_ids: list[int]
    seed: int


class Failed(Struct, tag=True, frozen=True):
    """The engine cannot go on, or refuses; ``reason`` is for people."""

    reason: str


FromTrainer = Configure | Generate | Abort | Hold | Push | Chunk | Score | Ping | Look | Ask | Stop
FromEngine = Ready | Finished | Loaded | Scored | Running | Looked | Pong | Task | Failed

_encoder = msgspec.msgpack.Encoder()
_from_trainer: msgspec.msgpack.Decoder[FromTrainer] = msgspec.msgpack.Decoder(FromTrainer)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def encode(message: FromTrainer | FromEngine | PromptRow) -> bytes:
    """Return the message as msgpack."""
    return _encoder.encode(message)


def from_trainer(frame: bytes) -> FromTrainer:
    """Return the message in a frame; raise ``msgspec.DecodeError`` or ``ValidationError`` where there is none."""
    return _from_trainer.decode(frame)


def from_engine(frame: bytes) -> FromEngine:
    """Return the message in a frame; raise ``msgspec.DecodeError`` or ``ValidationError`` where there is none."""
    return _from_engine.decode(frame)


def float_bytes(values: list[float] | Tensor) -> bytes:
    """Return numbers as little-endian float32."""
    array = torch.as_tensor(values, dtype=torch.float32).numpy()
    return array.astype("<f4").tobytes()


def float_tensor(data: bytes) -> Tensor:
    """Return what :func:`float_bytes` was given, as float32 [N]."""
    assert sys.byteorder == "little"
    return torch.frombuffer(bytearray(data), dtype=torch.float32) if data else torch.zeros(0)
