"""Generation that takes new requests while others run, which episodes of several turns need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from lightrl.distributed import all_objects
from lightrl.rng import derive_seed
from lightrl.types import Completion, Sampling


@dataclass(frozen=True, slots=True)
class Request:
    """One completion that is wanted."""

    key: int
    """Comes back with the completion; unique among this rank's requests that have not ended."""
    prompt_ids: list[int]
    """All tokens so far."""
    max_tokens: int
    """Longest completion, its stop token included."""
    seed: int
    """Of this completion alone."""


class Session(Protocol):
    """An engine at work. Ranks that share the engine call :meth:`step` equally often, with the same weights all along.

    Attributes:
        in_rounds: a step ends every request that it was given, so it should be given as many as there are.
    """

    in_rounds: bool

    def step(self, requests: list[Request]) -> list[tuple[int, Completion]]:
        """Take further requests, work on all there are and return (key, completion) of those that ended."""

    def gather(self, value: Any) -> list[Any]:
        """Return ``value`` of every rank that has to step together with this one, this one included."""


class RoundSession:
    """A session on a blocking ``generate`` which all ranks call together: one call a step.

    Args:
        generate: ``generate(prompts, sampling)``, such as a strategy's.
        sampling: of every request; its ``prompt_seeds`` only say whether each request keeps its own seed.
    """

    in_rounds = True

    def __init__(
        self, generate: Callable[[list[list[int]], Sampling], list[list[Completion]]], sampling: Sampling
    ) -> None:
        self._generate, self._sampling = generate, sampling
        self._rounds = 0

    def step(self, requests: list[Request]) -> list[tuple[int, Completion]]:
        """See :class:`Session`."""
        longest = max(self.gather(max((r.max_tokens for r in requests), default=1)))
        sampling = replace(
            self._sampling,
            num_completions=1,
            max_completion_tokens=longest,
            seed=derive_seed(self._sampling.seed, "round", self._rounds),
            prompt_seeds=tuple(r.seed for r in requests) if self._sampling.prompt_seeds else (),
        )
        self._rounds += 1
        found = self._generate([r.prompt_ids for r in requests], sampling)
        return [(r.key, _cut(group[0], r.max_tokens)) for r, group in zip(requests, found, strict=True)]

    def gather(self, value: Any) -> list[Any]:
        """See :class:`Session`."""
        return all_objects(value)


def _cut(completion: Completion, size: int) -> Completion:
    """Return what a request of at most ``size`` tokens would have got."""
    if len(completion.token_ids) <= size:
        return completion
    return Completion(
        completion.token_ids[:size], completion.logprobs[:size], completion.policy_versions[:size], truncated=True
    )
