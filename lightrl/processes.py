"""Whether a process of this host still runs."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path


def is_alive(pid: int) -> bool:
    """Tell whether process ``pid`` of this host runs; one that has ended and that nobody waited for does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    with suppress(OSError, IndexError):  # no /proc: taken for alive
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    return True


def host_id() -> str:
    """Return a name that processes share whose ids mean the same: host and namespace."""
    namespace = ""
    with suppress(OSError):
        namespace = str(Path("/proc/self/ns/pid").readlink())
    return f"{socket.gethostname()} {namespace}"
