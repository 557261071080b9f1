"""An engine in its own process: ``python -m lightrl.engines.server --bind tcp://127.0.0.1:5555``.

It serves one trainer at a time, the last to send a configuration. The token that trainers must know is in the
environment variable ``LIGHTRL_TOKEN``; on a loopback address, and only there, the server may run without one.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
import time
import traceback
from typing import Any

import msgspec
import torch
import zmq

from lightrl.engines import messages, secure
from lightrl.engines.messages import Abort, Chunk, Configure, Generate, Push, Score, Stop
from lightrl.engines.staging import Staging

_IDLE_MS = 200
_PARENT_SECONDS = 0.5

log = logging.getLogger("lightrl.engine")


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
        context: Any = zmq.Context.instance()
        self._doorman = secure.Doorman(context, token)
        self._socket = secure.server_socket(context, token)
        self._socket.bind(secure.check_address(address))
        self.address: str = self._socket.last_endpoint.decode().rstrip("\0")
        self._engine: Any = None
        self._trainer: bytes | None = None
        self._staging: Staging | None = None
        self._stopped = False

    def serve(self) -> None:
        """Serve until a trainer says stop."""
        while not self._stopped:
            busy = self._engine is not None and self._engine.busy
            if self._socket.poll(0 if busy else _IDLE_MS):
                self._receive()
            elif busy:
                for output in self._engine.step():
                    self._send(messages.Finished([output]))  # one by one: all that end at once may not fit in a frame

    def _receive(self) -> None:
        sender, *frames = self._socket.recv_multipart(copy=False)
        sender = sender.bytes
        try:
            message = messages.from_trainer(frames[0].buffer if frames else b"")
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            log.warning("refused a message that is none of ours: %s", error)
            return
        if isinstance(message, Configure):
            self._configure(sender, message)
        elif sender != self._trainer:
            log.warning("refused a message of a trainer that this engine does not serve")
        else:
            self._handle(message, frames)

    def _configure(self, sender: bytes, message: Configure) -> None:
        if self._engine is not None and self._engine.spec != message.spec:
            self._engine.close()
            self._engine = None
        self._trainer, self._staging = sender, None
        if self._engine is None:
            from lightrl.engines.continuous import ContinuousEngine

            self._engine = ContinuousEngine(message.spec)
        self._engine.abort_all()
        torch.manual_seed(message.seed)
        self._send(messages.Ready(os.getpid()))

    def _handle(self, message: messages.FromTrainer, frames: list[Any]) -> None:
        match message:
            case Generate():
                for request in message.requests:
                    self._engine.submit(request)
            case Abort():
                self._engine.abort(message.ids)
            case Score():
                scores = self._engine.score(message.sequences)
                self._send(messages.Scored([messages.float_bytes(s) for s in scores]))
            case Push():
                self._staging = Staging(message)
            case Chunk() if self._staging is not None and len(frames) == 2:
                self._staging.add(message.offset, frames[1].buffer)
                if self._staging.complete:
                    self._load(self._staging)
            case Stop():
                self._stopped = True
            case _:
                log.warning("refused a piece of weights that nobody announced")

    def _load(self, staging: Staging) -> None:
        push, self._staging = staging.push, None
        seconds = self._engine.load(staging.tensors(), push.version, push.recompute_kv)
        self._send(messages.Loaded(push.version, seconds))

    def _send(self, message: messages.FromEngine) -> None:
        try:
            self._socket.send_multipart([self._trainer, messages.encode(message)])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            log.warning("the trainer is gone: its requests are dropped")
            self._trainer = None
            if self._engine is not None:
                self._engine.abort_all()

    def fail(self, reason: str) -> None:
        """Tell the trainer why this process is about to end."""
        if self._trainer is not None:
            self._send(messages.Failed(reason))
            time.sleep(0.1)  # the message leaves on another thread

    def close(self) -> None:
        """Release the socket and the engine."""
        self._socket.close(linger=1000)
        self._doorman.close()
        if self._engine is not None:
            self._engine.close()


def end_with_parent(pid: int, run_folder: str | None) -> None:
    """End this process within a second of its parent's end, however that came about."""

    def watch() -> None:
        while os.getppid() == pid:
            time.sleep(_PARENT_SECONDS)
        if run_folder is not None:
            import shutil

            shutil.rmtree(run_folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="lightrl-parent-watch", daemon=True).start()


def main(argv: list[str] | None = None) -> int:
    """Run the server from the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m lightrl.engines.server", description=__doc__)
    parser.add_argument("--bind", required=True, metavar="ADDRESS", help="tcp://HOST:PORT or ipc://PATH")
    parser.add_argument("--parent", type=int, metavar="PID", help="end when this parent process ends")
    parser.add_argument("--run-folder", help="removed when the parent process ends before this one")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        address = secure.check_address(args.bind)
        local = secure.is_local(address) and secure.TOKEN_VARIABLE not in os.environ
        token = secure.LOOPBACK_TOKEN if local else secure.token_for(address)
    except ValueError as error:
        parser.error(str(error))
    os.environ.pop(secure.TOKEN_VARIABLE, None)  # not for rewards, plugins or children to see
    if args.parent is not None:
        end_with_parent(args.parent, args.run_folder)
    server = EngineServer(address, token)
    print(f"engine listens on {server.address}", flush=True)
    try:
        server.serve()
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        traceback.print_exc()
        server.fail(f"{type(error).__name__}: {error}")
        return 1
    finally:
        server.close()
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # everything is closed; what torch and vLLM do at exit takes seconds
