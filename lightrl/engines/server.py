"""An engine in its own process: ``python -m lightrl.engines.server --bind tcp://127.0.0.1:5555``.

It serves one trainer at a time, the last to send a configuration. The token that trainers must know is in the
environment variable ``LIGHTRL_TOKEN``; on a loopback address, and only there, the server may run without one.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
import zmq

from lightrl.engines import messages, secure
from lightrl.engines.messages import Abort, Ask, Chunk, Configure, EngineSpec, Generate, Look, Ping, Push, Score, Stop
from lightrl.engines.parent import end_with_parent
from lightrl.engines.staging import Staging

_IDLE_MS = 200
_HOLD_SECONDS = 0.05
"""Longer than a trainer on this host takes to lay weights down; where it takes longer, generation goes on."""

log = logging.getLogger("lightrl.engine")


class RefusedError(ValueError):
    """A message asks for what cannot be; the engine is as it was."""


class EngineServer:
    """Owns the socket and the engine; everything happens in one thread, between two steps of the engine.

    Args:
        address: where to listen.
        token: what trainers must know.

    Raises:
        ValueError: the address is none.
        zmq.ZMQError: it cannot be bound.
    """

    def __init__(self, address: str, token: str) -> None:
        secure.check_address(address, bind=True)
        self._context: Any = zmq.Context()
        self._doorman = secure.Doorman(self._context, token)
        self._socket = secure.server_socket(self._context, token)
        self._engine: Any = None
        try:
            self._socket.bind(address)
        except zmq.ZMQError:
            self.close()
            raise
        self.address: str = self._socket.last_endpoint.decode().rstrip("\0")
        self._has_secret = token != secure.LOOPBACK_TOKEN
        self._trainer: bytes | None = None
        self._gone: bytes | None = None
        self._staging: Staging | None = None
        self._held: float | None = None  # since when
        self._stopped = False

    def serve(self) -> None:
        """Serve until a trainer says stop, then release the socket and the engine.

        Raises:
            Exception: what befell the engine; the trainer was told.
        """
        try:
            while not self._stopped:
                self._turn()
        except Exception as error:
            if self._trainer is not None:
                self._send(messages.Failed(f"{type(error).__name__}: {error}"))
            raise
        finally:
            self.close()

    def _turn(self) -> None:
        busy = self._engine is not None and self._engine.busy
        wait = self._hold_ms() or (0 if busy else _IDLE_MS)
        if self._socket.poll(wait) and not isinstance(self._receive(), Chunk):
            return  # requests that came together begin together
        self._held = None
        if busy:  # between any two pieces of weights too, of which there may be many
            for output in self._engine.step():
                self._send(messages.Finished([output]))  # one by one: all that end at once may not fit in a frame

    def _hold_ms(self) -> int:
        """How much longer no step may begin."""
        if self._held is None:
            return 0
        return max(0, round(1000 * (self._held + _HOLD_SECONDS - time.perf_counter())))

    def _receive(self) -> messages.FromTrainer | None:
        sender, *frames = self._socket.recv_multipart(copy=False)
        sender = sender.bytes
        try:
            message = messages.from_trainer(frames[0].buffer if frames else b"")
        except (msgspec.DecodeError, RecursionError) as error:
            self._refuse(sender, f"a message that is none of ours: {error}")
            return None
        if isinstance(message, Configure):
            self._configure(sender, message)
        elif sender == self._gone != self._trainer:
            pass  # what was on its way when it went
        elif sender != self._trainer:
            self._refuse(sender, f"{type(message).__name__} of a trainer that this engine does not serve")
        else:
            try:
                self._handle(message, frames)
            except RefusedError as error:
                self._refuse(sender, str(error))
        return message

    def _refuse(self, sender: bytes, what: str) -> None:
        """What a peer sends must not end the engine; but the peer must not wait for an answer either."""
        log.warning("refused %s", what)
        self._send(messages.Failed(f"the engine refused {what}"), sender)

    def _configure(self, sender: bytes, message: Configure) -> None:
        try:
            spec = self._accept(message.spec)
        except RefusedError as error:
            self._refuse(sender, str(error))
            return
        if self._trainer not in (None, sender):
            self._send(messages.Failed("another trainer took this engine over"))
        if self._engine is not None and self._engine.spec != spec:
            self._engine.close()
            self._engine = None
        self._trainer, self._staging, self._held = sender, None, None
        if self._engine is None:
            from lightrl.engines.continuous import ContinuousEngine

            self._engine = ContinuousEngine(spec)
        self._engine.abort_all()
        torch.manual_seed(message.seed)
        self._send(messages.Ready(os.getpid()))

    def _accept(self, spec: EngineSpec) -> EngineSpec:
        """Return what is built for a trainer that wants ``spec``; RefusedError: nothing."""
        if not self._has_secret and (unsafe := spec.runs_code):
            raise RefusedError(f"{unsafe} without a token: it runs code. Set {secure.TOKEN_VARIABLE} on both sides")
        return spec

    def _handle(self, message: messages.FromTrainer, frames: list[Any]) -> None:
        match message:
            case Generate():
                self._submit(message)
            case Abort():
                self._engine.abort(message.ids)
            case Score():
                with _refusing("sequences to score"):
                    scores = self._engine.score(message.sequences)
                self._send(messages.Scored([messages.float_bytes(s) for s in scores]))
            case messages.Hold() | Push() | Chunk():
                self._take_weights(message, frames)
            case Look():
                self._tell_running()
            case Ping():
                self._send(messages.Pong())
            case Ask():
                raise RefusedError("to give prompts: it has none. A lightrl.RolloutServer has")
            case Stop():
                self._stopped = True

    def _submit(self, message: Generate) -> None:
        for request in message.requests:
            with _refusing(f"request {request.id!r}"):
                self._engine.submit(request)

    def _take_weights(self, message: messages.Hold | Push | Chunk, frames: list[Any]) -> None:
        if isinstance(message, messages.Hold):
            self._held = time.perf_counter()
        elif isinstance(message, Chunk):
            self._add(message, frames)
        else:
            with _refusing("a push"):
                self._begin(message)

    def _begin(self, push: Push) -> None:
        held, self._held = self._held, None
        if push.shared is None:
            self._staging = Staging(push, self._engine.device)
            return
        stood = 0.0 if held is None else time.perf_counter() - held
        self._loaded(push.version, stood + self._engine.load_shared(push))

    def _tell_running(self) -> None:
        for output in self._engine.running():
            self._send(messages.Running(output))
        self._send(messages.Looked())

    def _add(self, chunk: Chunk, frames: list[Any]) -> None:
        staging, self._staging = self._staging, None  # a push with a piece that is refused is over
        if staging is None or len(frames) != 2:
            raise RefusedError("a piece of weights that nobody announced, or without its bytes")
        with _refusing("a piece of weights"):
            staging.add(chunk.offset, frames[1].buffer)
        if not staging.complete:
            self._staging = staging
            return
        push = staging.push
        self._loaded(push.version, self._engine.load(staging.weights(), push.version, push.recompute_kv))

    def _loaded(self, version: int, seconds: float) -> None:
        self._send(messages.Loaded(version, seconds))

    def _send(self, message: messages.FromEngine, to: bytes | None = None) -> None:
        self._send_frame(messages.encode(message), to)

    def _send_frame(self, frame: bytes, to: bytes | None = None) -> None:
        if to is None and self._trainer is None:
            return  # it went while there was more to tell
        try:
            self._socket.send_multipart([to or self._trainer, frame])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            if to in (None, self._trainer):
                log.warning("the trainer is gone: its requests are dropped")
                self._trainer, self._gone = None, self._trainer
                if self._engine is not None:
                    self._engine.abort_all()

    def close(self) -> None:
        """Release the socket and the engine; may be called twice."""
        if self._context.closed:
            return
        self._socket.close(linger=1000)
        self._doorman.close()
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        self._context.term()  # waits for the last message to leave


@contextmanager
def _refusing(what: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise RefusedError(f"{what}: {error}") from error


def main(argv: list[str] | None = None) -> int:
    """Run the server from the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m lightrl.engines.server", description=__doc__)
    parser.add_argument("--bind", required=True, metavar="ADDRESS", help="tcp://HOST:PORT (0: any) or ipc://PATH")
    parser.add_argument("--parent", type=int, metavar="PID", help="end when this parent process ends")
    parser.add_argument("--run-folder", help="removed when the parent process ends before this one")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        address = secure.check_address(args.bind, bind=True)
        token = secure.own_token(address)
    except ValueError as error:
        parser.error(str(error))
    os.environ.pop(secure.TOKEN_VARIABLE, None)  # not for rewards, plugins or children to see
    if args.parent is not None:
        end_with_parent(args.parent, args.run_folder)
    try:
        server = EngineServer(address, token)
    except zmq.ZMQError as error:
        parser.error(f"cannot listen on {address}: {error}")
    print(f"engine listens on {server.address}", flush=True)
    try:
        server.serve()
    except KeyboardInterrupt:
        return 130
    except Exception:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # everything is closed; what torch and vLLM do at exit takes seconds
