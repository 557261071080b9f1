"""One connection to one engine process, for code that runs on the pool's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import msgspec
import zmq
import zmq.asyncio
from torch import Tensor
from zmq.utils.monitor import recv_monitor_message

from lightrl.engines import messages, secure
from lightrl.engines.messages import EngineSpec, Finished, Loaded, Output, Pong, Ready, Request, Scored, Task
from lightrl.engines.staging import Shipment

_ENDS = (
    zmq.EVENT_DISCONNECTED,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
)

T = TypeVar("T")


class EngineLostError(RuntimeError):
    """The engine's process or the way to it is gone."""


class EngineClient:
    """Speaks with an engine until it is lost. Made and used on a running event loop.

    Args:
        context: ZeroMQ's, of asyncio's kind.
        address: of the engine.
        token: that the engine knows.
    """

    def __init__(self, context: zmq.asyncio.Context, address: str, token: str) -> None:
        self.address = address
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done when the engine is lost; its result says why."""
        # Both say every second that they are there. On one that waits to write, as in a push, none gets through.
        self._socket, self._pulse = (secure.client_socket(context, token) for _ in range(2))
        self._monitors = [socket.get_monitor_socket() for socket in (self._socket, self._pulse)]
        self._outputs: dict[str, asyncio.Future[Output]] = {}
        self._running: list[Output] = []
        self._answers: dict[type, asyncio.Future[Any]] = {}
        self._socket.connect(address)
        self._pulse.connect(address)
        self._tasks = [asyncio.create_task(work) for work in (self._read(), *map(self._watch, self._monitors))]

    @property
    def pending(self) -> int:
        """Requests that have not ended."""
        return len(self._outputs)

    async def configure(self, spec: EngineSpec, seed: int) -> Ready:
        """Have the engine built; return when it stands."""
        return await self._ask(Ready, [messages.encode(messages.Configure(spec, seed))])

    def hold(self) -> None:
        """Tell the engine that a shipment is about to come: it begins no step before, for a moment."""
        if not self.lost.done():
            self._send([messages.encode(messages.Hold())])

    async def ship(self, shipment: Shipment) -> Loaded:
        """Send weights; return when they are loaded and checked."""
        return await self._ask(Loaded, *shipment.frames())

    async def score(self, sequences: list[list[int]]) -> list[Tensor]:
        """Return, for each sequence of L tokens, float32 [L - 1]: logprobs of tokens 2..L at temperature 1."""
        scored = await self._ask(Scored, [messages.encode(messages.Score(sequences))])
        return [messages.float_tensor(data) for data in scored.logprobs]

    async def ping(self) -> Pong:
        """Return as soon as the engine is between two steps."""
        return await self._ask(Pong, [messages.encode(messages.Ping())])

    async def task(self) -> list[Task]:
        """Return the prompts that a rollout server has, in pages."""
        pages: list[Task] = []
        while not pages or len(pages) < pages[0].pages:
            pages.append(await self._ask(Task, [messages.encode(messages.Ask(len(pages)))]))
        return pages

    def generate(
        self, requests: list[Request], note: Callable[[Output], None] | None = None
    ) -> list[asyncio.Future[Output]]:
        """Submit requests; each future ends with its output, which ``note`` gets, or with :class:`EngineLostError`."""
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in requests]
        if self.lost.done():
            for future in futures:
                future.set_exception(EngineLostError(self.lost.result()))
            return futures
        self._outputs |= {r.id: f for r, f in zip(requests, futures, strict=True)}
        if note is not None:
            for future in futures:
                future.add_done_callback(partial(_tell, note))
        self._send([messages.encode(messages.Generate(requests))])
        return futures

    async def running(self) -> list[Output]:
        """Return what has been sampled so far of requests that have not ended."""
        self._running = []
        await self._ask(messages.Looked, [messages.encode(messages.Look())])
        return self._running

    def abort(self, ids: list[str]) -> None:
        """Forget requests that have not ended."""
        known = [i for i in ids if self._outputs.pop(i, None) is not None]
        if known and not self.lost.done():
            self._send([messages.encode(messages.Abort(known))])

    def stop(self) -> None:
        """Ask the process to end."""
        if not self.lost.done():
            self._send([messages.encode(messages.Stop())])

    def give_up(self, reason: str) -> None:
        """Take the engine for lost; what waits for it is told."""
        self._lose(reason)

    def close(self, linger_ms: int = 0) -> None:
        """End the connection; what waits for the engine is told that it is lost."""
        self._lose("the connection was closed")
        if self._socket.closed:
            return
        for task in self._tasks:
            task.cancel()
        for socket, monitor in zip((self._socket, self._pulse), self._monitors, strict=True):
            socket.disable_monitor()
            monitor.close(0)
            socket.close(linger_ms)

    async def _ask(self, kind: type[T], *frames: list[Any]) -> T:
        if self.lost.done():
            raise EngineLostError(self.lost.result())
        answer = self._answers[kind] = asyncio.get_running_loop().create_future()
        for parts in frames:
            self._send(parts)
        result: T = await answer
        return result

    def _send(self, parts: list[Any]) -> None:
        # Never blocks and never drops: the high-water mark is off, and libzmq sends on its own thread.
        zmq.Socket.send_multipart(self._socket, parts, flags=zmq.NOBLOCK, copy=False)

    async def _read(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            try:
                message = messages.from_engine(frames[0])
            except (msgspec.DecodeError, msgspec.ValidationError) as error:
                self._lose(f"it sent what is no message: {error}")
                return
            if isinstance(message, Finished):
                for output in message.outputs:
                    future = self._outputs.pop(output.id, None)
                    if future is not None and not future.done():
                        future.set_result(output)
            elif isinstance(message, messages.Running):
                self._running.append(message.output)
            elif isinstance(message, messages.Failed):
                self._lose(message.reason)
            else:
                answer = self._answers.pop(type(message), None)
                if answer is not None and not answer.done():
                    answer.set_result(message)

    async def _watch(self, monitor: Any) -> None:
        reason = f"{self.address} refused us: its token is another one, or no engine listens there"
        while True:
            event = await recv_monitor_message(monitor)
            if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                reason = "the connection ended"
            elif event["event"] in _ENDS:
                await asyncio.sleep(0.05)  # its last message, which says more, may be in the queue
                self._lose(reason)

    def _lose(self, reason: str) -> None:
        if self.lost.done():
            return
        self.lost.set_result(reason)
        for future in (*self._outputs.values(), *self._answers.values()):
            if not future.done():
                future.set_exception(EngineLostError(reason))
        self._outputs.clear()
        self._answers.clear()


def _tell(note: Callable[[Output], None], future: asyncio.Future[Output]) -> None:
    if not future.cancelled() and future.exception() is None:
        note(future.result())
