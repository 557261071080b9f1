"""Every test starts offline and clean, and fails when it leaves something behind for the next one."""

import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker

import psutil
import pytest

os.environ |= {
    "OMP_NUM_THREADS": "1",  # models this small only lose time to threads that wait for each other
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # or torch keeps threads, and for GPUs processes, that outlive a test
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
}
if sys.platform == "linux":
    # Otherwise gloo binds to whatever the host's name resolves to, which in a container may be nothing.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"

RANK_VARIABLES = ("RANK", "GROUP_RANK", "WORLD_SIZE")
# Lightning leaves these after a distributed fit, vLLM's CPU platform the last: restored, no fault of the test.
THIRD_PARTY_VARIABLES = ("LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE")
GRACE_SECONDS = 3.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    asking = [item for item in items if item.get_closest_marker("gpu")]
    if asking:
        import torch

        if not torch.cuda.is_available():
            for item in asking:
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


def distributed_environment() -> dict[str, str]:
    return {name: os.environ[name] for name in RANK_VARIABLES + THIRD_PARTY_VARIABLES if name in os.environ}


def live_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if not thread.daemon}


def live_children() -> set[psutil.Process]:
    # Python's own helper for shared memory, one a process, until it exits; and MPI's, where Lightning looks whether it
    # was started by MPI: a process whose helper is killed ends at once.
    tracker = resource_tracker._resource_tracker._pid
    children = [c for c in psutil.Process().children() if c.pid != tracker and c.status() != psutil.STATUS_ZOMBIE]
    return {child for child in children if child.name() != "orted"}


def process_group_is_up() -> bool:
    distributed = sys.modules.get("torch.distributed")  # not imported by now: not up
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def destroy_process_group() -> None:
    """Lightning keeps its process group until the process exits; vLLM's groups are made inside it and go first."""
    if vllm_state := sys.modules.get("vllm.distributed.parallel_state"):
        vllm_state.destroy_model_parallel()
        vllm_state.destroy_distributed_environment()
    if process_group_is_up():
        sys.modules["torch.distributed"].destroy_process_group()


def restore_environment(before: dict[str, str]) -> list[str]:
    after = distributed_environment()
    changed = [name for name in RANK_VARIABLES if before.get(name) != after.get(name)]
    for name in after:
        del os.environ[name]
    os.environ.update(before)
    return [f"{name}={after.get(name)!r} (was {before.get(name)!r})" for name in changed]


def wait_for_end(threads: set[threading.Thread], children: set[psutil.Process]) -> list[str]:
    """Give what is just ending the time to end; kill the processes that stay, name all that stayed."""
    if not (live_threads() - threads or live_children() - children):
        return []
    gc.collect()  # a thread pool ends when nobody holds it any more
    deadline = time.monotonic() + GRACE_SECONDS
    while (live_threads() - threads or live_children() - children) and time.monotonic() < deadline:
        time.sleep(0.02)
    stayed = [f"thread {thread.name!r}" for thread in live_threads() - threads]
    for child in live_children() - children:
        stayed.append(f"process {child.pid} {' '.join(child.cmdline())!r}")
        child.kill()
        child.wait()
    return stayed


def grad_modes() -> list[str]:
    """Modes of autograd that would make every later test train on nothing; switched back for those."""
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    left = ["inference mode"] if torch.is_inference_mode_enabled() else []
    if not torch.is_grad_enabled() and not left:
        left.append("gradients off")
        torch.set_grad_enabled(True)
    return left


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    environment, threads, children = distributed_environment(), live_threads(), live_children()
    group_was_up = process_group_is_up()
    yield
    if process_group_is_up() and not group_was_up:
        destroy_process_group()
    left = restore_environment(environment) + wait_for_end(threads, children) + grad_modes()
    if left:
        pytest.fail("the test left behind: " + ", ".join(left), pytrace=False)
