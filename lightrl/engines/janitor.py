"""Files in shared memory that a killed engine would leave behind, removed by a process that outlives it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

_SHARED = "/dev/shm/"
# It reads until the last holder of the other end, the engine, is gone: even kill -9 closes a pipe.
_PROGRAM = """
import contextlib, os, sys
for path in sys.stdin.buffer.read().split(b"\\0"):
    with contextlib.suppress(OSError):
        os.unlink(path)
"""


class Janitor:
    """Waits for the end of this process, however it comes about, and then removes files."""

    def __init__(self) -> None:
        # A session of its own, without imports: whoever kills the engine's whole group does not kill this.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def add(self, paths: Iterable[str]) -> None:
        """Remove these files too, if they are there then."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"".join(os.fsencode(path) + b"\0" for path in paths))
        self._process.stdin.flush()


def shared_files() -> set[str]:
    """Return the files in shared memory that this process and its children have mapped; none where Linux is not."""
    children = [p.read_text().split() for p in Path("/proc/self/task").glob("*/children")]
    found: set[str] = set()
    for pid in ("self", *(pid for pids in children for pid in pids)):
        try:
            maps = Path("/proc", pid, "maps").read_text().splitlines()
        except OSError:  # it has ended, or there is no /proc
            continue
        found |= {line[line.index(_SHARED) :] for line in maps if _SHARED in line and not line.endswith("(deleted)")}
    return found
