"""Engines on a real Ray cluster of two nodes: one is killed, then a node is lost, and the run goes on."""

import asyncio
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from lightning.pytorch import Callback

from lightrl.pools.ray import RayLauncher
from lightrl.prompts import PromptOrder
from lightrl.strategies import AsyncVLLMStrategy
from tests.helpers.fits import BAR, cleaned_up, fit, plain_copy, tiny_data
from tests.helpers.tiny import by_hand, tiny_model, tiny_prompts

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]  # engines start four times

PROMPTS, MAX_STALENESS = 16, 1
# Loopback, but not 127.0.0.1: that one Ray takes for the address that other hosts know this one by.
HEAD, WORKER = "127.0.0.2", "127.0.0.3"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes, each with room for both engines; nobody is connected."""
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 2, "object_store_memory": 80 * 2**20}
    with pytest.MonkeyPatch.context() as patch, cleaned_up():
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_DEDUP_LOGS", "0")
        # A node that is gone is noticed in seconds; by default Ray takes up to half a minute.
        health = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000, "health_check_timeout_ms": 3000}
        head = node | {"node_ip_address": HEAD, "include_dashboard": False, "_system_config": health}
        cluster = Cluster(True, head_node_args=head)
        try:
            cluster.add_node(**node, node_ip_address=WORKER)
            patch.setattr(ray, "init", partial(ray.init, address=cluster.address, _node_ip_address=HEAD))
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


def engines_of(node: Any) -> list[psutil.Process]:
    """Processes of actors on a node."""
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    return [p for p in raylet.children() if p.cmdline()[:1] and p.cmdline()[0].startswith("ray::EngineActor")]


_LONGEST = 200
"""Seconds for an engine that starts again beside all else that is tested."""


class Story(Callback):
    """Kills an engine, then removes the node of the other, and watches what training gets meanwhile."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self.spread: list[int] = []
        self.processes: list[psutil.Process] = []
        self.steps: dict[str, int] = {}
        self.seconds: dict[str, float] = {}
        self.policies: dict[int, Any] = {}
        self.gaps: list[float] = []
        self.staleness: list[int] = []
        self.rows: list[int] = []
        self._since = 0.0

    def on_weights_synced(self, trainer: Any, module: Any, policy_version: int, seconds: float) -> None:
        self.policies[policy_version] = plain_copy(module)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        prompts = {r.group_id: r.prompt_ids for r in batch.rollouts}
        self.rows += [self.row_of[tuple(ids)] for ids in prompts.values()]
        for rollout in batch.rollouts:
            versions = rollout.policy_versions
            self.staleness.append(trainer.global_step - int(versions.min()))
            for version in versions.unique().tolist():
                found = by_hand(self.policies[version], rollout.prompt_ids, rollout.completion_ids)
                own = versions == version
                self.gaps.append(float((found - rollout.rollout_logprobs)[own].abs().max()))

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.script, self.pool = self._script(), trainer.strategy._pool
        self.row_of = {tuple(p.token_ids): i for i, p in enumerate(trainer.datamodule._train)}

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.step = trainer.global_step
        time.sleep(0.2)  # the cores are for the engines that start again
        if next(self.script, "over") == "over":
            trainer.should_stop = True

    def _script(self) -> Iterator[None]:
        (worker,) = self.cluster.worker_nodes
        yield from self._steps(3)
        here, there = engines_of(self.cluster.head_node), engines_of(worker)
        self.spread, self.processes = [len(here), len(there)], here + there
        self._since = time.monotonic()
        os.kill(here[0].pid, signal.SIGKILL)
        yield from self._until("kill seen", serving=1)
        yield from self._until("kill healed", serving=2)
        self._since = time.monotonic()
        self.cluster.remove_node(worker, allow_graceful=False)
        yield from self._until("node loss seen", serving=1)
        yield from self._until("node loss healed", serving=2)
        self.processes += engines_of(self.cluster.head_node)
        yield from self._steps(3)

    def _steps(self, n: int) -> Iterator[None]:
        for _ in range(n):
            yield

    def _until(self, what: str, serving: int) -> Iterator[None]:
        while sum(e.serving for e in self.pool._engines) != serving:
            assert time.monotonic() < self._since + _LONGEST, f"no {what!r} after {_LONGEST} s"
            yield
        self.steps[what], self.seconds[what] = self.step, time.monotonic() - self._since


@pytest.fixture(scope="module")
def story(cluster: Any) -> Story:
    """What came of one run."""
    ray.init(log_to_driver=False)
    story = Story(cluster)
    strategy = AsyncVLLMStrategy(MAX_STALENESS, pool="ray", num_engines=2)
    data = tiny_data(tiny_prompts(PROMPTS))
    _, trainer = fit(tiny_model(), strategy, lr=1e-4, data=data, callbacks=[story], max_steps=2000)
    story.end = SimpleNamespace(
        steps=trainer.global_step,
        connected=ray.is_initialized(),
        groups=[g["state"] for g in ray.util.placement_group_table().values()],
    )
    ray.shutdown()
    return story


def test_two_engines_land_on_two_nodes(story: Story) -> None:
    assert story.spread == [1, 1]


def test_a_killed_engine_is_seen_and_restarted_while_the_run_goes_on(story: Story) -> None:
    assert story.seconds["kill seen"] < 5
    assert story.steps["kill healed"] > story.steps["kill seen"] + 2


def test_a_lost_node_is_seen_and_its_engine_placed_on_the_other_while_the_run_goes_on(story: Story) -> None:
    assert story.seconds["node loss seen"] < 10
    assert story.steps["node loss healed"] > story.steps["node loss seen"] + 2
    assert story.end.steps > story.steps["node loss healed"]


def test_engines_have_the_current_weights_before_they_serve(story: Story) -> None:
    assert max(story.gaps) < BAR
    assert max(story.staleness) <= MAX_STALENESS
    first, last = story.policies[0], story.policies[max(story.policies)]
    prompt, completion = [5, 9], [7, 8, 9]
    assert (by_hand(first, prompt, completion) - by_hand(last, prompt, completion)).abs().max() > 10 * BAR


def test_no_prompt_is_lost_or_trained_twice(story: Story) -> None:
    ahead = (MAX_STALENESS + 1) * 4
    order = PromptOrder(PROMPTS, tiny_data().seed).take(len(story.rows) + ahead)
    found = Counter(story.rows)
    assert found <= Counter(order)
    assert Counter(order[: len(story.rows) - ahead]) <= found


def test_the_run_leaves_nothing_but_the_ray_that_it_found(story: Story) -> None:
    assert story.end.connected
    assert story.end.groups == ["REMOVED"]
    assert len(story.processes) == 4
    psutil.wait_procs(story.processes, timeout=5)
    assert not [p for p in story.processes if p.is_running()]


# -- the launcher on its own -------------------------------------------------------------------------------------------


def light_actor() -> Any:
    """An actor that has an address and serves nothing: it starts in a second. It travels by value, not by name."""

    class EngineActor:
        def __init__(self, token: str) -> None:
            import socket

            import ray

            self.socket = socket.create_server((ray.util.get_node_ip_address(), 0))

        def address(self) -> str:
            host, port = self.socket.getsockname()
            return f"tcp://{host}:{port}"

        def serve(self) -> None:
            self.socket.accept()

    return EngineActor


def test_an_engine_that_hangs_is_replaced_and_what_was_connected_is_closed(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightrl.pools.ray.EngineActor", light_actor())
    handler = signal.getsignal(signal.SIGTERM)
    launcher = RayLauncher(1)
    try:
        assert signal.getsignal(signal.SIGTERM) is handler
        first = asyncio.run(launcher.start(0))
        assert launcher.ended(0) is None
        second = asyncio.run(launcher.start(0))  # the pool asks for another one: it took this one for lost
        assert first.startswith(f"tcp://{HEAD}:")
        assert second.startswith(f"tcp://{HEAD}:")
        assert second != first
        (process,) = engines_of(cluster.head_node)
        process.kill()
        deadline = time.monotonic() + 10
        while launcher.ended(0) is None and time.monotonic() < deadline:
            time.sleep(0.1)
        assert "its Ray actor ended" in launcher.ended(0)
        assert launcher.last_words(0) == launcher.ended(0)
    finally:
        launcher.close(1)
    assert not ray.is_initialized()
    launcher.close(1)


def test_an_engine_that_no_node_has_room_for_says_what_it_needs(cluster: Any) -> None:
    launcher = RayLauncher(1, num_gpus=1, timeout=2)
    try:
        with pytest.raises(TimeoutError, match=r"engine 0 within 2 s: each of 1 engines needs .*'GPU': 1.0.*'CPU': "):
            asyncio.run(launcher.start(0))
    finally:
        launcher.close(1)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"lightrl-trainer\[ray\]"):
        RayLauncher(1)
