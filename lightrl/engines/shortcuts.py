"""Shortcuts through vLLM's scheduler for what a step of decoding asks of it, once for every request.

With hundreds of requests the host's work for a step takes longer than the GPU's. Most of it is the same for each: one
more token, no further block of the cache, nobody who reads it yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightrl.engines import compat
from lightrl.engines.late_output import LateOutput, notes_of

_PLAIN_WITHOUT = (
    "connector",
    "ec_connector",
    "aux_output_connector",
    "enable_return_routed_experts",
    "defer_block_free",
    "num_spec_tokens",
    "num_lookahead_tokens",
    "use_pp",
)
"""Of a scheduler: what is asked about every request that it schedules, or changes what a step of decoding is."""
_LIMITS = ("max_num_running_reqs", "max_num_active_reqs")
"""By version of vLLM: requests that may run at once."""


def shorten_decoding(llm: Any) -> None:
    """Have an in-process engine take shortcuts, where its scheduler is vLLM's own.

    Scheduling is left as it is unless the cache is one group of full attention: others count their blocks otherwise.
    """
    scheduler: Any = compat.scheduler_of(llm)
    if type(scheduler).__name__ not in ("Scheduler", "AsyncScheduler"):
        return
    groups = scheduler.kv_cache_manager.coordinator.single_type_managers
    simple = len(groups) == 1 and type(groups[0]).__name__ == "FullAttentionManager"
    block_size = groups[0].block_size if simple else 1
    scheduler.update_from_output = LateOutput(scheduler, llm.llm_engine.output_processor, block_size)
    if simple and not any(getattr(scheduler, name, None) for name in _PLAIN_WITHOUT):
        scheduler.schedule = ShortSchedule(scheduler, block_size)


class ShortSchedule:
    """Stands in for ``schedule`` of an in-process engine's scheduler.

    A request that samples one more token, somewhere inside a block of its cache, is scheduled here. Anything else goes
    vLLM's own way, which then sees those alone.

    Args:
        scheduler: vLLM's.
        block_size: of its cache, in tokens.
    """

    def __init__(self, scheduler: Any, block_size: int) -> None:
        self._scheduler, self._block_size = scheduler, block_size
        self._vllms = scheduler.schedule
        self._limits = ["max_num_scheduled_tokens", *(name for name in _LIMITS if hasattr(scheduler, name))]
        self._ahead = type(scheduler).__name__ == "AsyncScheduler"
        # Version 1 of vLLM's model runner is sent all tokens of a request that the last step did not have.
        self._before: Any = None if scheduler.use_v2_model_runner else scheduler.prev_step_scheduled_req_ids

    def __call__(self, *how: Any) -> Any:
        """See vLLM's ``Scheduler.schedule``."""
        plain, rest = self._split() if self._may_split(how) else ([], [])
        if not plain:
            return self._vllms(*how)
        with self._only(rest, len(plain)):
            scheduled = self._vllms(*how)
        self._add(scheduled, plain)
        return scheduled

    def _may_split(self, how: tuple[Any, ...]) -> bool:
        """Whether it makes no difference in which order requests are looked at: each gets what it needs.

        Where another may join, or memory is short and one may have to give way, vLLM weighs all against each other.
        """
        scheduler = self._scheduler
        running = len(scheduler.running)
        return (
            not any(how)
            and not scheduler._pause_state
            and scheduler.kv_cache_manager.block_pool.get_num_free_blocks() >= running
            and running <= scheduler.max_num_scheduled_tokens
            and (
                running >= min(getattr(scheduler, name) for name in self._limits[1:])
                or scheduler.get_num_unfinished_requests() == running
            )
        )

    def _split(self) -> tuple[list[Any], list[Any]]:
        """Return running requests that sample one more token inside a block, and the others, which sample one too.

        None and none where one has more to compute than that, which may take more blocks than there are.
        """
        size, before = self._block_size, self._before
        # A block that this token fills is cached as it is scheduled, or, where vLLM is a step ahead, with the output.
        last = size if self._ahead else size - 1
        plain, rest = [], []
        for request in self._scheduler.running:
            notes = notes_of(request)
            computed, under_way = request.num_computed_tokens, request.num_output_placeholders
            if len(request._all_token_ids) + under_way != computed + 1 or request.is_prefill_chunk:
                return [], []
            if (
                notes is not None
                and 0 < computed % size < last
                and len(request._output_token_ids) + under_way < notes.limit
                and (before is None or request.request_id in before)
            ):
                plain.append(request)
            else:
                rest.append(request)
        return plain, rest

    @contextmanager
    def _only(self, rest: list[Any], without: int) -> Iterator[None]:
        """Have vLLM know of the ``rest`` alone, and of what the others leave of its limits."""
        scheduler, running = self._scheduler, self._scheduler.running
        limits = {name: getattr(scheduler, name) for name in self._limits}
        vars(scheduler).update({name: limit - without for name, limit in limits.items()}, running=rest)
        try:
            yield
        finally:
            vars(scheduler).update(limits, running=running)

    def _add(self, scheduled: Any, plain: list[Any]) -> None:
        names = [request.request_id for request in plain]
        cached = scheduled.scheduled_cached_reqs
        cached.req_ids += names
        cached.new_block_ids += [None] * len(plain)
        cached.num_computed_tokens += [request.num_computed_tokens for request in plain]
        cached.num_output_tokens += [len(r._output_token_ids) + r.num_output_placeholders for r in plain]
        scheduled.num_scheduled_tokens.update(dict.fromkeys(names, 1))
        scheduled.total_num_scheduled_tokens += len(plain)
        if self._before is not None:
            self._before.update(names)
        for request in plain:
            request.num_computed_tokens += 1
            request.num_in_flight_tokens += 1
            if self._ahead:
                request.num_output_placeholders += 1
