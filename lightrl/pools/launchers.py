"""Who starts engine processes, and where they listen."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Protocol

from lightrl.engines import secure

_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_RANK")
_RANK_PREFIXES = ("MASTER_", "TORCHELASTIC_", "PMI_", "SLURM_", "LIGHTRL_")
_LAST_WORDS = 3000


class Launcher(Protocol):
    """Starts engines and says what became of them."""

    num_engines: int
    token: str
    owns: bool
    """Whether the engines end with the run."""

    async def start(self, index: int) -> str:
        """Start an engine, or another in its place; return its address."""

    def ended(self, index: int) -> str | None:
        """Return how the engine's process ended, or None while it runs or where that cannot be known."""

    def last_words(self, index: int) -> str:
        """Return the end of what the engine printed."""

    def close(self, seconds: float) -> None:
        """End all processes within about ``seconds``; may be called twice."""


class LocalLauncher:
    """Child processes on this host that listen on sockets in a private folder, not on ports.

    Args:
        num_engines: how many.
        devices: for each engine, the GPUs that it sees; None: no GPU.
    """

    owns = True

    def __init__(self, num_engines: int = 1, devices: list[list[str]] | None = None) -> None:
        self.num_engines, self.devices = num_engines, devices
        self.token = secure.new_token()
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self._folder = Path(tempfile.mkdtemp(prefix="lightrl-pool-"))
        self._starts = 0

    async def start(self, index: int) -> str:
        """See :class:`Launcher`."""
        self._kill(index)
        self._starts += 1
        address = f"ipc://{self._folder}/{index}-{self._starts}.sock"
        command = [sys.executable, "-m", "lightrl.engines.server", "--bind", address]
        command += ["--parent", str(os.getpid()), "--run-folder", str(self._folder)]
        with self._log(index, "wb") as log:
            # A group of its own: Ctrl-C is the trainer's to handle, and vLLM's workers can be ended with it.
            self.processes[index] = subprocess.Popen(
                command, env=self._environment(index), stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0
            )
        return address

    def _environment(self, index: int) -> dict[str, str]:
        env = {k: v for k, v in os.environ.items() if k not in _RANK_VARIABLES and not k.startswith(_RANK_PREFIXES)}
        package = str(Path(__file__).resolve().parents[2])
        env["PYTHONPATH"] = os.pathsep.join([package, *filter(None, [env.get("PYTHONPATH")])])
        # Temporary files go where they are removed, however the engine ends.
        env |= {secure.TOKEN_VARIABLE: self.token, "VLLM_HOST_IP": "127.0.0.1", "TMPDIR": str(self._folder)}
        # All but what is worth keeping for the next engine: torch's compiled kernels.
        env.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}")
        env["CUDA_VISIBLE_DEVICES"] = ",".join(self.devices[index] if self.devices is not None else [])
        return env

    def _log(self, index: int, mode: str) -> IO[bytes]:
        return (self._folder / f"{index}.log").open(mode)

    def ended(self, index: int) -> str | None:
        """See :class:`Launcher`."""
        code = self.processes[index].poll()
        if code is None:
            return None
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        return f"its process {how}"

    def last_words(self, index: int) -> str:
        """See :class:`Launcher`."""
        try:
            with self._log(index, "rb") as log:
                return log.read()[-_LAST_WORDS:].decode(errors="replace").strip()
        except OSError:
            return ""

    def close(self, seconds: float) -> None:
        """See :class:`Launcher`."""
        for process in self.processes.values():
            try:
                process.wait(timeout=seconds)
            except subprocess.TimeoutExpired:
                seconds = 0.1
        for index in list(self.processes):
            self._kill(index)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _kill(self, index: int) -> None:
        process = self.processes.pop(index, None)
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # vLLM's workers too, which may outlive their parent
        process.wait()


class FixedLauncher:
    """Engines that somebody else starts, and starts again: by hand, a scheduler, Kubernetes.

    Args:
        addresses: where they listen.

    Raises:
        ValueError: an address is none, or it is not local and ``LIGHTRL_TOKEN`` is not set.
    """

    owns = False

    def __init__(self, addresses: list[str]) -> None:
        if not addresses:
            raise ValueError("pool=[] has no engine: give at least one address, such as tcp://127.0.0.1:5555")
        self.addresses = [secure.check_address(a) for a in addresses]
        self.num_engines = len(addresses)
        remote = next((a for a in addresses if not secure.is_local(a)), None)
        known = secure.TOKEN_VARIABLE in os.environ
        self.token = secure.token_for(remote or addresses[0]) if remote or known else secure.LOOPBACK_TOKEN

    async def start(self, index: int) -> str:
        """See :class:`Launcher`: whoever minds the engine starts it; here one only connects."""
        return self.addresses[index]

    def ended(self, index: int) -> str | None:
        """See :class:`Launcher`."""
        return None

    def last_words(self, index: int) -> str:
        """See :class:`Launcher`."""
        return ""

    def close(self, seconds: float) -> None:
        """Nothing to end: these engines are not ours."""
