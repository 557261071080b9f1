"""Shortcuts through vLLM's scheduler for what nearly every step of decoding asks of it, many times a step.

With hundreds of requests the host's work for a step takes longer than the GPU's, and a third of it is to find that a
request needs no further block of the cache, and that none of its blocks has become full.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from lightrl.engines import compat

_NEEDED = ("block_size", "req_to_blocks", "num_cached_block")


def shorten_decoding(llm: Any) -> bool:
    """Have an in-process engine take shortcuts, where its cache is one group of full attention.

    Returns:
        Whether it does; another version of vLLM or kind of cache may not be as it has to be.
    """
    manager: Any = getattr(compat.scheduler_of(llm), "kv_cache_manager", None)
    groups: Any = getattr(getattr(manager, "coordinator", None), "single_type_managers", ())
    if len(groups) != 1 or type(groups[0]).__name__ != "FullAttentionManager":
        return False
    if not all(hasattr(groups[0], name) for name in _NEEDED) or not hasattr(manager, "empty_kv_cache_blocks"):
        return False
    manager.allocate_slots = partial(_allocate_slots, manager.allocate_slots, manager.empty_kv_cache_blocks, groups[0])
    manager.cache_blocks = partial(_cache_blocks, manager.cache_blocks, groups[0])
    return True


def _allocate_slots(whole: Any, nothing: Any, group: Any, request: Any, num_new_tokens: int, **how: Any) -> Any:
    """Return that no block is needed where the next token neither begins nor fills one of a request that runs."""
    if num_new_tokens == 1 and how == {"num_lookahead_tokens": 0}:
        place = request.num_computed_tokens % group.block_size
        blocks = group.req_to_blocks.get(request.request_id, ())
        if 0 < place < group.block_size - 1 and request.num_computed_tokens < len(blocks) * group.block_size:
            return nothing
    return whole(request, num_new_tokens, **how)


def _cache_blocks(whole: Any, group: Any, request: Any, num_computed_tokens: int) -> None:
    """Do nothing where no block has become full since the last time."""
    if num_computed_tokens // group.block_size > group.num_cached_block.get(request.request_id, -1):
        whole(request, num_computed_tokens)
