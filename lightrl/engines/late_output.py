"""What a request samples is put together once, when it ends, and not token by token.

vLLM makes an object of every sampled token, for front ends that show it as it comes. Here nobody reads a request before
it ends, and with hundreds of them that work takes the host longer than the step takes a GPU.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_NOTES = "lightrl_notes"
_STALE = ("num_stale_output_tokens", "async_tokens_to_discard")
"""Of a request, by version of vLLM: how much of what is under way for it will not count."""
_OTHERWISE = (
    "pooler_output",
    "num_nans_in_logits",
    "kv_connector_output",
    "routed_experts",
    "aux_output_connector_output",
    "sampling_masks",
)
"""Of what a step returned: what vLLM has to see to."""


@dataclass(slots=True)
class Notes:
    """What is noted of a running request: which next tokens are nothing special, and those that vLLM has not passed on.

    They hang on vLLM's request, and go with it.
    """

    limit: int
    """With so many tokens sampled the next may be the last."""
    stops: frozenset[int]
    stale: str
    """The one of ``_STALE`` that there is."""
    passed_on: int = 0
    """Tokens."""
    logprobs: list[float] = field(default_factory=list)
    """Of the tokens after those."""

    @classmethod
    def of(cls, request: Any, max_model_len: int) -> Notes:
        """Begin, where all that it has sampled was passed on."""
        longest = min(request.max_tokens, max_model_len - request.num_prompt_tokens)
        params = request.sampling_params
        stops = frozenset([params.eos_token_id, *(params.stop_token_ids or ())])
        (stale,) = (name for name in _STALE if hasattr(request, name))
        return cls(longest - 1, stops, stale, len(request._output_token_ids))

    def to_pass_on(self, request: Any, kind: Any) -> tuple[list[int], Any]:
        """Return token ids, and logprobs in vLLM's ``kind`` of lists, and forget them."""
        ids = request._output_token_ids[self.passed_on : self.passed_on + len(self.logprobs)]
        values = np.array(self.logprobs, dtype=np.float32)[:, None]
        self.passed_on += len(ids)
        self.logprobs = []
        return ids, kind(np.array(ids)[:, None], values, np.zeros(len(ids), np.int64))


class LateOutput:
    """Stands in for ``update_from_output`` of an in-process engine's scheduler.

    Of a request that samples one more token and goes on, the token and its logprob are noted. Anything else goes vLLM's
    own way, together with what was noted.

    Args:
        scheduler: vLLM's.
        processor: vLLM's, of outputs.
        block_size: tokens after which a block of every cache may be full, at the least.
    """

    def __init__(self, scheduler: Any, processor: Any, block_size: int) -> None:
        self._scheduler, self._processor, self._block_size = scheduler, processor, block_size
        self._vllms = scheduler.update_from_output
        # Of vLLM, known when it has made some: classes of an output and of logprobs, and a status.
        self._outputs: Any = None
        self._lists: Any = None
        self._running: Any = None
        # It schedules a step before it knows what the last one made.
        self._ahead = type(scheduler).__name__ == "AsyncScheduler"

    def __call__(self, scheduled: Any, sampled: Any) -> dict[int, Any]:
        """See vLLM's ``Scheduler.update_from_output``."""
        rest = self._note(scheduled, sampled)
        if len(rest) < len(scheduled.num_scheduled_tokens):
            scheduled = copy.copy(scheduled)
            scheduled.num_scheduled_tokens = rest
        requests = {name: self._scheduler.requests.get(name) for name in rest}
        outputs: dict[int, Any] = self._vllms(scheduled, sampled)
        for group in outputs.values():
            for output in group.outputs:
                self._complete(output, requests.get(output.request_id))
        return outputs

    def _note(self, scheduled: Any, sampled: Any) -> dict[str, int]:
        """Note what goes on; return what is left for vLLM, with the tokens that were scheduled of it."""
        counts: dict[str, int] = scheduled.num_scheduled_tokens
        logprobs = sampled.logprobs
        special = scheduled.scheduled_spec_decode_tokens or any(getattr(sampled, name, None) for name in _OTHERWISE)
        if special or not logprobs or logprobs.cu_num_generated_tokens is not None:
            return counts
        values = logprobs.logprobs[:, 0].tolist()
        cached, hashed = self._scheduler.kv_cache_manager.cache_blocks, self._scheduler.hash_block_size
        requests, places, tokens = self._scheduler.requests, sampled.req_id_to_index, sampled.sampled_token_ids
        rest: dict[str, int] = {}
        for name, count in counts.items():
            request = requests.get(name)
            notes = notes_of(request)
            if notes is None or count != 1:
                rest[name] = count
                continue
            place = places[name]
            ids = tokens[place]
            if len(ids) != 1 or not self._goes_on(request, notes, ids[0]):
                rest[name] = count
                continue
            request._output_token_ids.append(ids[0])
            request._all_token_ids.append(ids[0])
            if len(request._all_token_ids) % hashed == 0:
                request.update_block_hashes()
            request.num_in_flight_tokens -= 1
            if self._ahead:
                request.num_output_placeholders -= 1
                computed = request.num_computed_tokens - request.num_output_placeholders
                if computed % self._block_size == 0:
                    cached(request, computed)
            notes.logprobs.append(values[place])
        return rest

    def _goes_on(self, request: Any, notes: Notes, token: int) -> bool:
        return (
            request.status is self._running
            and len(request._output_token_ids) < notes.limit
            and token not in notes.stops
            and not getattr(request, notes.stale)
        )

    def _complete(self, output: Any, request: Any) -> None:
        """Put what was noted before what vLLM passes on, and begin to note where a request is like most."""
        notes = notes_of(request)
        if notes is None:
            if request is not None and output.finish_reason is None and _is_plain(request):
                setattr(request, _NOTES, Notes.of(request, self._scheduler.max_model_len))
                self._outputs, self._lists = type(output), type(output.new_logprobs)
                self._running = type(request.status).RUNNING
            return
        new = len(output.new_token_ids)
        if notes.logprobs:
            ids, logprobs = notes.to_pass_on(request, self._lists)
            output.new_token_ids = ids + output.new_token_ids
            output.new_logprobs = _joined(logprobs, output.new_logprobs)
        notes.passed_on += new

    def pass_on(self) -> None:
        """Have vLLM's front end know all that was noted."""
        outputs = []
        for name, request in self._scheduler.requests.items():
            notes = notes_of(request)
            if notes is not None and notes.logprobs:
                ids, logprobs = notes.to_pass_on(request, self._lists)
                outputs.append(self._outputs(name, ids, new_logprobs=logprobs))
        self._processor.process_outputs(outputs)


def notes_of(request: Any) -> Notes | None:
    """Return what is noted of vLLM's ``request``, None where it is not one of those whose output waits."""
    notes: Notes | None = getattr(request, _NOTES, None)
    return notes


def _joined(first: Any, then: Any) -> Any:
    if then is None:
        return first
    ids, values = then.logprob_token_ids[:, :1], then.logprobs[:, :1]  # others of the batch may have asked for more
    pairs = zip(first[:3], (ids, values, then.sampled_token_ranks), strict=True)
    return type(then)(*map(np.concatenate, pairs))


def _is_plain(request: Any) -> bool:
    """Whether nobody reads what a request samples before it ends, and nothing but a token or a length ends it."""
    params = request.sampling_params
    return (
        params is not None
        and params.output_kind.name == "FINAL_ONLY"
        and params.logprobs == 0
        and params.flat_logprobs
        and not params.stop
        and not params.min_tokens
        and not getattr(params, "repetition_detection", None)
        and request.structured_output_request is None
        and not request.has_encoder_inputs
        and not getattr(request, "resumable", False)
        and sum(hasattr(request, name) for name in _STALE) == 1
    )
