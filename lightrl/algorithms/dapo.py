"""DAPO: GRPO with clip-higher, dynamic sampling, token-level loss and a soft penalty on over-long completions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightrl.advantages import zero_spread
from lightrl.module import RLModule
from lightrl.types import RolloutBatch, RolloutGroup


class DAPO(RLModule):
    """Decoupled clip and dynamic sampling (arXiv:2503.14476).

    ``A_i = (r_i - mean of its group) / std of its group`` and, with ``rho = pi / pi_old``,

    ``L = mean over all tokens of -min(rho A, clip(rho, 1 - 0.2, 1 + 0.28) A)``

    over groups whose rewards differ: others are replaced by freshly sampled prompts, so an epoch (counted in steps)
    visits more prompts than it has. The reward of a completion of length l is lowered by (eq. 13, b the buffer)

    ``0 if l <= max - b; (l - (max - b)) / b otherwise``, 1 at the longest allowed completion.

    Groups are judged, and ``reward/mean`` is logged, before that penalty.

    Args:
        model: see :class:`lightrl.RLModule`.
        clip_ratio_high: clip-higher.
        overlong_buffer: b in tokens; 0 is no penalty, None a fifth of the longest allowed completion (4096 of 20480 in
            the paper).
        max_sampling_rounds: after so many rounds of sampling a step trains on the groups it has; 1 replaces none.
        kwargs: RLModule's.
    """

    def __init__(
        self,
        model: Any,
        clip_ratio_high: float = 0.28,
        overlong_buffer: int | None = None,
        max_sampling_rounds: int = 10,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, clip_ratio_high=clip_ratio_high, **kwargs)
        if max_sampling_rounds < 1 or (overlong_buffer or 0) < 0:
            raise ValueError(
                f"max_sampling_rounds={max_sampling_rounds} must be at least 1 and overlong_buffer={overlong_buffer} "
                "must not be negative"
            )
        self.overlong_buffer, self.max_sampling_rounds = overlong_buffer, max_sampling_rounds

    def keep_group(self, group: RolloutGroup) -> bool:
        """Keep a group whose rewards differ."""
        return not bool(zero_spread(group.rewards, [0] * len(group.rewards)).all())

    def rewards(self, batch: RolloutBatch) -> Tensor:
        """Return rewards less the over-long penalty."""
        longest = batch.max_completion_tokens
        buffer = longest // 5 if self.overlong_buffer is None else self.overlong_buffer
        if buffer > longest:
            raise ValueError(f"overlong_buffer={buffer} is more than max_completion_tokens={longest}")
        if not buffer:
            return super().rewards(batch)
        lengths = torch.tensor([len(r.completion_ids) for r in batch], dtype=torch.float64)
        return super().rewards(batch) - ((lengths - (longest - buffer)) / buffer).clamp(0, 1)
