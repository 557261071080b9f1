"""Ranks of a run as processes that are forked from one that has everything imported: a fraction of a second each."""

from __future__ import annotations

import multiprocessing as mp
import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_context = mp.get_context("forkserver")


def preload(*modules: str) -> None:
    """Import these once, in the process that the others are forked from."""
    _context.set_forkserver_preload(list(modules))


def run_ranks(
    target: Callable[..., None], args: Sequence[Any], ranks: int, log: Path, timeout: float
) -> tuple[list[int | None], float]:
    """Run ``target(*args)`` on so many ranks; return their exit codes (None: killed after ``timeout``) and seconds.

    What they print goes to ``log``.0, ``log``.1, ...
    """
    port = free_port()
    started = time.monotonic()
    children = [
        _context.Process(target=_rank, args=(target, tuple(args), rank, ranks, port, f"{log}.{rank}"))
        for rank in range(ranks)
    ]
    for child in children:
        child.start()
    codes = []
    for child in children:
        child.join(max(0.0, started + timeout - time.monotonic()))
        codes.append(child.exitcode)
        if child.exitcode is None:
            child.kill()
            child.join()
    return codes, time.monotonic() - started


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _rank(target: Callable[..., None], args: tuple[Any, ...], rank: int, ranks: int, port: int, log: str) -> None:
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    if ranks > 1:  # as an environment that starts processes itself has it
        os.environ |= {
            "LOCAL_RANK": str(rank),
            "NODE_RANK": "0",
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    target(*args)


def stop_server() -> None:
    """End the process that the others are forked from."""
    from multiprocessing import forkserver

    forkserver._forkserver._stop()  # type: ignore[attr-defined]
