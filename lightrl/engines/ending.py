"""How engines in this process end: vLLM's process groups and memory belong to all that stand, and go last."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from lightrl.distributed import drop_lone_group
from lightrl.engines import compat

log = logging.getLogger(__name__)

_standing: set[object] = set()
"""One entry for each engine of this process that shares vLLM's groups, or is being built."""


@contextmanager
def groups_held() -> Iterator[object]:
    """Keep vLLM's process groups while an engine is built: another may end meanwhile, also by the garbage collector.

    What it gives is for :func:`end_with`; where building fails, groups that nobody needs end.
    """
    held = object()
    _standing.add(held)
    try:
        yield held
    except BaseException:
        _standing.discard(held)
        _drop_groups()
        raise


def end_with(llm: Any, held: object) -> weakref.finalize[[Any, object], Any]:
    """Have an in-process engine end when its ``llm`` is collected, or when what is returned is called, once.

    vLLM's own finalizer would take the default process group with it, which is the trainer's.
    """
    engine = llm.llm_engine
    finalizer = getattr(engine.engine_core, "_finalizer", None)
    if finalizer is not None:
        finalizer.detach()
    return weakref.finalize(llm, _shut_down, engine, held)


def _shut_down(engine: Any, held: object) -> None:
    if torch.cuda.is_initialized():
        _keep_allocators()
        _wake(engine)
    compat.forget_model(engine)
    engine.model_executor.shutdown()
    renderer: Any = getattr(engine, "renderer", None)
    if hasattr(renderer, "shutdown"):
        renderer.shutdown()  # or its idle threads stay until the garbage collector finds them
    _standing.discard(held)
    _drop_groups()


_allocators: list[Any] = []
"""Of memory that a sleeping engine can do without: torch calls them where it frees what they allocated."""


def drop_pools() -> None:
    """Give the device back what ended engines had: vLLM keeps it, and refuses to build another engine beside it."""
    if not _standing and torch.cuda.is_initialized():
        _keep_allocators().clear()
        gc.collect()
        torch.cuda.empty_cache()


def _keep_allocators() -> dict[str, Any]:
    """Hold what vLLM lets go of while there is memory that it has to free, and return vLLM's pools."""
    from vllm.device_allocator.cumem import CuMemAllocator

    pools: dict[str, Any] = getattr(getattr(CuMemAllocator, "instance", None), "allocator_and_pools", {})
    for held in pools.values():  # (pool, allocator), or a list of these
        for _, allocator in held if isinstance(held, list) else [held]:
            if all(allocator is not kept for kept in _allocators):
                _allocators.append(allocator)
    return pools


def _wake(engine: Any) -> None:
    """Have an engine that sleeps get its memory again: what is not there cannot be freed."""
    if not engine.is_sleeping():
        return
    torch.cuda.empty_cache()
    try:
        engine.wake_up()
    except Exception as error:  # the driver's, where there is no room
        log.warning("an engine ended asleep, so no other can follow in this process: %s", error)


def _drop_groups() -> None:
    """End the process groups that vLLM made, unless an engine of this process still needs them."""
    from vllm.distributed import parallel_state

    if _standing:
        return
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        if parallel_state._WORLD is not None:
            parallel_state._WORLD.destroy()
            parallel_state._WORLD = None
    for name, value in list(vars(parallel_state).items()):  # they ended with the default group
        if isinstance(value, parallel_state.GroupCoordinator):
            setattr(parallel_state, name, None)
    drop_lone_group()
