"""Shared memory of an engine that is killed."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

SHARED = Path("/dev/shm")
pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason="needs Linux")

PROGRAM = """
import mmap, multiprocessing, signal, sys, time
from pathlib import Path
from lightrl.engines.janitor import Janitor, shared_files

def hold(path):
    file = open(path, "r+b")
    return mmap.mmap(file.fileno(), 0)

def child(path):
    held = hold(path)
    print("child", flush=True)
    signal.pause()

own, childs, later, other = (Path("/dev/shm", f"{sys.argv[1]}-{n}") for n in ("own", "child", "later", "other"))
for path in (own, childs, other):
    path.write_bytes(bytes(10))
held = hold(own)
process = multiprocessing.get_context("fork").Process(target=child, args=(childs,), daemon=True)
process.start()
time.sleep(0.5)
janitor = Janitor()
janitor.add(shared_files())
janitor.add([str(later)])
later.write_bytes(bytes(10))
print("ready", flush=True)
signal.pause()
"""


def until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def test_files_that_a_killed_process_had_mapped_are_removed_and_no_others() -> None:
    prefix = f"lightrl-test-{os.getpid()}"
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, prefix], stdout=subprocess.PIPE, text=True, process_group=0
    )
    assert process.stdout is not None
    try:
        while process.stdout.readline() != "ready\n":
            assert process.poll() is None
        assert len(list(SHARED.glob(f"{prefix}-*"))) == 4
        os.killpg(process.pid, signal.SIGKILL)
        other = SHARED / f"{prefix}-other"
        assert until(lambda: list(SHARED.glob(f"{prefix}-*")) == [other])
    finally:
        process.kill()
        process.communicate()
        for path in SHARED.glob(f"{prefix}-*"):
            path.unlink()


def mapped_by(process: psutil.Process) -> set[Path]:
    """Return the files in shared memory that a process and its children have mapped: other tests run beside this."""
    family = [process, *process.children(recursive=True)]
    paths = {Path(m.path) for p in family for m in p.memory_maps()}
    return {path for path in paths if SHARED in path.parents and path.exists()}


@pytest.mark.vllm
@pytest.mark.slow
def test_a_tensor_parallel_engine_that_is_killed_leaves_nothing_in_shared_memory() -> None:
    from lightrl.engines.messages import EngineSpec, Request
    from lightrl.engines.staging import Shipment
    from lightrl.engines.vllm import engine_config
    from lightrl.pools.launchers import LocalLauncher
    from lightrl.pools.pool import EnginePool
    from lightrl.weights.source import HeldWeights
    from tests.helpers.tiny import tiny_model

    model, launcher = tiny_model(kv_heads=2), LocalLauncher()
    spec = EngineSpec(engine_config(model).to_dict(), "float32", max_model_len=64, tensor_parallel_size=2)
    pool = EnginePool(launcher, spec, max_restarts=0)
    weights = [(name, p.detach()) for name, p in model.named_parameters()]
    try:
        pool.start()
        pool.push(Shipment(HeldWeights(weights), 0, recompute_kv=True))
        running = asyncio.run_coroutine_threadsafe(pool.generate([Request("1", [5, 6], 8)]), pool.loop)
        assert len(running.result(60)[0].token_ids) <= 8
        engine = launcher.processes[0].pid
        held = mapped_by(psutil.Process(engine))
        assert held, "it has none, so this shows nothing"
        os.killpg(engine, signal.SIGKILL)
        assert until(lambda: not any(path.exists() for path in held), seconds=30), held
    finally:
        pool.close()
