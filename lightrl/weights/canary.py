"""A few fixed sequences scored by trainer and engine after a push: do they agree (invariant 2)?"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from lightrl.engines.base import Engine, WeightSyncError
from lightrl.packing import pack
from lightrl.types import Rollout

LONGEST = 12
_LENGTHS = (LONGEST, 9, 3)
# Mean |difference| of logprobs. A stale engine shows about 1; bfloat16 noise on 0.6B parameters 0.02.
_LIMIT = {torch.float32: 1e-3, torch.bfloat16: 0.15}


class Canary:
    """Random sequences over a vocabulary.

    Args:
        vocab_size: ids are drawn below it.
    """

    def __init__(self, vocab_size: int) -> None:
        draw = random.Random(vocab_size)
        self.sequences = [[draw.randrange(vocab_size) for _ in range(n)] for n in _LENGTHS]

    @torch.no_grad()
    def trainer_logprobs(self, module: Any) -> list[Tensor]:
        """Return the policy's logprobs of tokens 2..L of each sequence at temperature 1: float32 [L - 1]."""
        rollouts = [Rollout(s[:1], s[1:], torch.zeros(len(s) - 1)) for s in self.sequences]
        micro = pack(rollouts, temperature=1.0).to(module.device)
        # Training compiles other graphs, with gradients; these would be compiled for these few tokens alone.
        with torch.compiler.set_stance("force_eager"):
            logprobs = module.policy_forward(module.policy, micro, with_entropy=False)[0].cpu()
        return list(logprobs.split([len(s) - 1 for s in self.sequences]))

    def check(self, engine: Engine, expected: list[Tensor], dtype: torch.dtype) -> float:
        """Return the mean |difference| between the engine's logprobs and ``expected``.

        Raises:
            WeightSyncError: it is beyond the noise of ``dtype``.
        """
        return self.compare(engine.score(self.sequences), expected, dtype)

    def compare(self, found: list[Tensor], expected: list[Tensor], dtype: torch.dtype) -> float:
        """As :meth:`check`, of logprobs that were found already."""
        difference = float((torch.cat(found) - torch.cat(expected)).abs().mean())
        if not difference <= _LIMIT[dtype]:
            raise WeightSyncError(
                f"engine and trainer disagree: mean |difference| of logprobs {difference:.3g} (limit {_LIMIT[dtype]} "
                f"in {dtype}), although every tensor that can be compared arrived. The engine computes another model: "
                "look at rope, head and norm settings, or at engine_args that change numerics."
            )
        return difference
