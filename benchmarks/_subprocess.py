"""A benchmark's program in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run_module(module: str, *args: object, timeout: float, cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    """Run ``python -m module args`` and return what it printed.

    Raises:
        RuntimeError: it failed; the error has the end of what it printed.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", module, *map(str, args)]
    done = subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": path} | (env or {}),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    if done.returncode:
        output = (done.stdout + done.stderr)[-4000:]
        raise RuntimeError(f"{' '.join(command[2:])} exited with {done.returncode}:\n{output}")
    return done.stdout
