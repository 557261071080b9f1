"""Engines as actors on a Ray cluster: Ray places them, watches them and starts them again."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import traceback
from typing import Any

from lightrl.engines import secure
from lightrl.optional import import_optional

_RETRY_SECONDS = 0.5
_NOTICE_SECONDS = 3.0

log = logging.getLogger(__name__)


class EngineActor:
    """What runs in the actor's process, on its main thread, where vLLM wants to be.

    Args:
        token: that the trainer knows.
    """

    def __init__(self, token: str) -> None:
        import ray

        from lightrl.engines.server import EngineServer

        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", stream=sys.stderr)
        host = ray.util.get_node_ip_address()
        os.environ["VLLM_HOST_IP"] = host
        self._server = EngineServer(f"tcp://{host}:0", token)

    def address(self) -> str:
        """Where it listens."""
        return self._server.address

    def serve(self) -> None:
        """Serve until the trainer says stop."""
        try:
            self._server.serve()
        except Exception:
            # The trainer was told. Ray starts a process again that died, not one in which a method raised.
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)


class RayLauncher:
    """One actor for each engine, spread over the nodes of the cluster that Ray is, or then gets, connected to.

    That is the one of ``RAY_ADDRESS`` or of this host; where there is none, Ray starts one on this host for the run.
    Engines listen on the addresses of their nodes, and only who has this run's token can talk to them.

    Args:
        num_engines: how many.
        num_gpus: of each.
        timeout: seconds that Ray may take to place an engine, or to place it again.

    Raises:
        ValueError: Ray is not installed.
    """

    owns = True

    def __init__(self, num_engines: int = 1, num_gpus: int = 0, timeout: float = 600.0) -> None:
        self._ray = import_optional("ray", "pool='ray'")
        self.num_engines, self.timeout = num_engines, timeout
        self.token = secure.new_token()
        self._connected = not self._ray.is_initialized()
        if self._connected:
            _connect(self._ray)
        self._needs = {"CPU": 1.0} | ({"GPU": float(num_gpus)} if num_gpus else {})
        self._group: Any = self._ray.util.placement_group([self._needs] * num_engines, strategy="SPREAD")
        self._actors: dict[int, Any] = {}
        self._serving: dict[int, Any] = {}  # the call of EngineActor.serve, which ends with the engine

    async def start(self, index: int) -> str:
        """See :class:`~lightrl.pools.launchers.Launcher`.

        Raises:
            TimeoutError: Ray has no place for it.
            RuntimeError: it cannot run where Ray placed it.
        """
        await self._end(index)
        if index not in self._actors:
            self._actors[index] = self._actor(index)
        try:
            address = await asyncio.wait_for(self._address(index), self.timeout)
        except TimeoutError:
            raise TimeoutError(
                f"Ray did not place engine {index} within {self.timeout:.0f} s: each of {self.num_engines} engines "
                f"needs {self._needs}, and the cluster has {self._ray.cluster_resources()}"
            ) from None
        self._serving[index] = self._actors[index].serve.remote()
        return address

    def _actor(self, index: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        options = {
            "num_cpus": self._needs["CPU"],
            "num_gpus": self._needs.get("GPU", 0),
            "max_restarts": -1,  # the pool counts losses
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index),
        }
        return self._ray.remote(EngineActor).options(**options).remote(self.token)

    async def _address(self, index: int) -> str:
        while True:
            try:
                return await self._actors[index].address.remote()  # type: ignore[no-any-return]
            except self._ray.exceptions.RayActorError as error:  # it is being started again
                if getattr(error, "actor_init_failed", False):
                    raise RuntimeError(f"engine {index} cannot run on its Ray node: {error}") from error
                await asyncio.sleep(_RETRY_SECONDS)

    async def _end(self, index: int) -> None:
        """Have Ray restart an engine that is not dead: it hangs, or the way to it is broken."""
        serving = self._serving.pop(index, None)
        if serving is None:
            return
        # Our socket may see a death before Ray does.
        done, _ = await asyncio.wait({asyncio.wrap_future(serving.future())}, timeout=_NOTICE_SECONDS)
        if not done:
            self._ray.kill(self._actors[index], no_restart=False)
        else:
            done.pop().exception()  # seen

    def ended(self, index: int) -> str | None:
        """See :class:`~lightrl.pools.launchers.Launcher`."""
        serving = self._serving.get(index)
        if serving is None or not self._ray.wait([serving], timeout=0)[0]:
            return None
        try:
            self._ray.get(serving)
        except self._ray.exceptions.RayError as error:
            return f"its Ray actor ended: {error}"
        return "it was stopped"

    def last_words(self, index: int) -> str:
        """See :class:`~lightrl.pools.launchers.Launcher`: what Ray knows; what it printed is where Ray's logs go."""
        return self.ended(index) or ""

    def close(self, seconds: float) -> None:
        """See :class:`~lightrl.pools.launchers.Launcher`; a Ray that others started goes on."""
        if self._group is None:
            return
        group, self._group = self._group, None
        serving = list(self._serving.values())
        if serving:
            self._ray.wait(serving, num_returns=len(serving), timeout=seconds)
        for actor in self._actors.values():
            self._ray.kill(actor)
        self._ray.util.remove_placement_group(group)
        self._actors.clear()
        self._serving.clear()
        if self._connected:
            self._ray.shutdown()


def _connect(ray: Any) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    on_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    ray.init(include_dashboard=False)
    if on_main:
        signal.signal(signal.SIGTERM, handler)  # Ray puts its own there; the Trainer's saves and ends the run
