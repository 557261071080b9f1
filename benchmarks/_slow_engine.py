"""An engine in a process of its own whose decode steps take as long as those of a large one."""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks._subprocess import ROOT


def serve(address: str, fixed: float, per_sequence: float) -> None:
    """Serve on ``address``; each decode step sleeps ``fixed`` seconds and ``per_sequence`` more for each sequence."""
    from lightrl.engines import continuous, server

    step = continuous.ContinuousEngine.step

    def slow(self: Any) -> Any:
        if self._changes:
            time.sleep(fixed + per_sequence * len(self._changes))
        return step(self)

    continuous.ContinuousEngine.step = slow  # type: ignore[method-assign]
    server.main(["--bind", address])


@contextmanager
def slow_engine(fixed: float, per_sequence: float) -> Iterator[str]:
    """Start one, give its address to the block, and end it; the token of the block's environment opens it."""
    from lightrl.engines.secure import TOKEN_VARIABLE, new_token

    token = new_token()
    command = [sys.executable, "-m", "benchmarks._slow_engine", "tcp://127.0.0.1:0", str(fixed), str(per_sequence)]
    engine = subprocess.Popen(
        command, cwd=ROOT, env=os.environ | {TOKEN_VARIABLE: token}, stdout=subprocess.PIPE, text=True
    )
    os.environ[TOKEN_VARIABLE] = token
    try:
        assert engine.stdout is not None
        yield engine.stdout.readline().split()[-1]
    finally:
        del os.environ[TOKEN_VARIABLE]
        engine.kill()
        engine.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks._slow_engine", description=serve.__doc__)
    parser.add_argument("address")
    parser.add_argument("fixed", type=float)
    parser.add_argument("per_sequence", type=float)
    serve(**vars(parser.parse_args()))
