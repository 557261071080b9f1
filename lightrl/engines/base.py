"""What every engine offers: token ids in; token ids, logprobs and versions out."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from lightrl.engines.session import Session
from lightrl.types import Completion, Sampling

if TYPE_CHECKING:
    from lightrl.weights.source import Weights


class WeightSyncError(RuntimeError):
    """The engine does not hold the policy's weights."""


def not_as_sent(names: list[str]) -> WeightSyncError:
    """Return the error for tensors that the engine does not hold as they were sent."""
    return WeightSyncError(f"after the push the engine does not hold what was sent as {', '.join(names[:8])}")


class Engine(Protocol):
    """An inference engine in this process. Every call is collective over the ranks that share it."""

    def generate(self, prompts: list[list[int]], sampling: Sampling, policy_version: int) -> list[list[Completion]]:
        """Return ``sampling.num_completions`` completions of each prompt, stamped with ``policy_version``."""

    def session(self, sampling: Sampling, policy_version: int) -> AbstractContextManager[Session]:
        """Generate with requests that come one by one; ``generate`` has to wait until the session ends."""

    def score(self, sequences: list[list[int]]) -> list[Tensor]:
        """Return, for each sequence of L tokens, float32 [L - 1]: logprobs of tokens 2..L at temperature 1."""

    def load_weights(self, weights: Weights) -> None:
        """Take weights, all of them, and forget what was cached under older ones."""

    def sleep(self) -> bool:
        """Give memory back; return whether the weights are gone and have to be loaded again."""

    def wake_weights(self) -> None:
        """Take the memory of the weights again."""

    def wake_cache(self) -> None:
        """Take the memory of the KV cache again; ``generate`` and ``score`` work from here on."""

    def close(self) -> None:
        """Release everything; may be called twice."""
