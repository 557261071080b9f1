"""A process that calls one function for its parent, and that can be killed: run as a program by killable.py.

It imports nothing of lightrl, so that it starts fast and stays small.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_GRACE_SECONDS = 5


def _find(path: str) -> Callable[..., Any]:
    module_name, _, name = path.rpartition(":")
    if module_name.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(module_name).stem, module_name)
        assert spec is not None
        assert spec.loader is not None
        found: Any = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = found
        spec.loader.exec_module(found)
    else:
        found = importlib.import_module(module_name)
    for part in name.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


def _answer(function: Callable[..., Any], call: tuple[Any, Any]) -> tuple[bool, Any]:
    args, kwargs = call
    try:
        value = function(*args, **kwargs)
        pickle.dumps(value)
    except Exception as error:
        return False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
    return True, value


def main() -> None:
    """Serve until the parent hangs up."""
    connection = Connection(int(sys.argv[1]))
    try:
        path, sys.path, timeout = connection.recv()
        try:
            function = _find(path)
        except BaseException as error:
            connection.send((False, f"{type(error).__name__}: {error}"))
            return
        connection.send((True, None))
        while True:
            call = connection.recv()
            # Ends this process whatever it is doing, should the parent be gone and not have killed it.
            signal.alarm(math.ceil(timeout) + _GRACE_SECONDS)
            connection.send(_answer(function, call))
            signal.alarm(0)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


if __name__ == "__main__":
    main()
