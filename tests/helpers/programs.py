"""Programs of tests and examples in processes of their own."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def server(*command: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    """A server's process, once it listens."""
    process = subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, text=True, env=os.environ | env, process_group=0
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "listens on" in line, line
        yield process
    finally:
        with suppress(ProcessLookupError):  # it may have ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
