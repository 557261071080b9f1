"""vLLM fed while it runs: requests join the batch at any step."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from lightrl.distributed import all_objects
from lightrl.engines import compat
from lightrl.engines.session import Request
from lightrl.types import Completion


class VLLMSession:
    """See :class:`~lightrl.engines.session.Session`.

    Args:
        llm: the engine.
        options: arguments of ``SamplingParams`` that all requests share.
        to_completion: makes a :class:`Completion` of vLLM's sample.
        group: ranks that share the engine; None: this one alone.
    """

    in_rounds = False

    def __init__(
        self, llm: Any, options: dict[str, Any], to_completion: Any, group: dist.ProcessGroup | None = None
    ) -> None:
        self._engine = llm.llm_engine
        self._options, self._to_completion, self._group = options, to_completion, group
        self._rank = dist.get_rank(group) if group is not None else 0
        self._running: set[str] = set()

    def step(self, requests: list[Request]) -> list[tuple[int, Completion]]:
        """See :class:`~lightrl.engines.session.Session`."""
        for owner, theirs in enumerate(self.gather(requests)):
            for request in theirs:
                self._add(f"{owner}/{request.key}", request)
        ended: list[tuple[int, Completion]] = []
        for output in self._engine.step() if self._running else ():
            if not output.finished:
                continue
            self._running.discard(output.request_id)
            owner, key = (int(part) for part in output.request_id.split("/"))
            if owner == self._rank:
                ended.append((key, self._to_completion(output.outputs[0])))
        return ended

    def _add(self, name: str, request: Request) -> None:
        params = compat.sampling_params(n=1, seed=request.seed, **{**self._options, "max_tokens": request.max_tokens})
        compat.add_request(self._engine, name, request.prompt_ids, params)
        self._running.add(name)

    def gather(self, value: Any) -> list[Any]:
        """See :class:`~lightrl.engines.session.Session`."""
        return [value] if self._group is None else all_objects(value, self._group)

    def close(self) -> None:
        """Drop what has not ended, so that the engine is free for others."""
        if self._running:
            self._engine.abort_request(list(self._running))
            self._running.clear()
