"""The policy on its way to the engines of a pool."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lightrl.distributed import from_rank_zero, rank
from lightrl.engines.staging import Shipment
from lightrl.pools.outbox import Outbox
from lightrl.pools.pool import EnginePool
from lightrl.weights.canary import Canary
from lightrl.weights.source import PolicyWeights, Shapes, check_shapes


class Publisher:
    """Pushes a policy: all ranks gather it together, and rank 0, which has the pool, sends it.

    Args:
        owner: has ``policy``, ``policy_forward`` and ``device``, as an ``RLModule`` has.
        dtype: of the engines' weights.
        outbox: packs them.
        recompute_kv: see :class:`~lightrl.engines.messages.Push`.
        shapes: what an engine takes; None: all that the policy has.
    """

    def __init__(
        self, owner: Any, dtype: torch.dtype, outbox: Outbox, recompute_kv: bool, shapes: Shapes | None = None
    ) -> None:
        self._owner, self._dtype, self._outbox, self._recompute_kv = owner, dtype, outbox, recompute_kv
        self._shapes = shapes
        self._weights = PolicyWeights(owner.policy, dtype, shapes)
        self._canary = Canary(owner.policy.config.get_text_config().vocab_size)

    @torch.no_grad()
    def push(
        self,
        pool: Callable[[], EnginePool],
        version: int,
        *,
        verify: bool,
        phase: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext(),
    ) -> None:
        """Give every engine the weights as they are now; return when all that serve hold them.

        Args:
            pool: returns it, on rank 0.
            version: what tokens that they sample are stamped with.
            verify: compare the engines' logprobs of a few sequences with the policy's.
            phase: what the sending is to happen in.

        Raises:
            WeightSyncError: an engine does not hold them, or a tensor has another shape than at first (nothing is sent
                then).
        """
        if self._shapes is not None:
            check_shapes(self._owner.policy, self._shapes)
        expected = self._canary.trainer_logprobs(self._owner) if verify else []
        with phase("push"):
            from_rank_zero(lambda: self._outbox.open(pool()))  # where that fails, the others must not gather alone
        if rank() == 0:
            shipment = self._outbox.pack(self._weights, version, self._recompute_kv)
        else:
            for _ in self._weights:  # gathering them takes all ranks
                pass
        with phase("push"):
            from_rank_zero(lambda: self._ship(pool(), shipment, expected))

    def _ship(self, pool: EnginePool, shipment: Shipment, expected: list[Tensor]) -> None:
        pool.push(shipment)
        if not expected:
            return
        work = pool.score(self._canary.sequences)
        for scores in pool.call(work, timeout=pool.push_timeout, what="a check of the weights"):
            self._canary.compare(scores, expected, self._dtype)
