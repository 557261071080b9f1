"""Trainer and engine take turns on the same device, and at its turn the engine holds the policy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lightrl.distributed import all_objects
from lightrl.engines.base import Engine
from lightrl.offload import StateOffload
from lightrl.weights.canary import Canary
from lightrl.weights.source import PolicyWeights, Shapes, check_shapes

_MARGIN_BYTES = 2**31  # of what waking allocates beside weights and cache
_ROOM = 1.5
"""Times what a turn of the trainer has needed: a later one may have fuller micro-batches, and memory has gaps."""


class Swap:
    """What both sides do at a change of turns: trainer state out, engine weights in, push, KV cache in; and back.

    Every call is collective over the ranks that share the policy or the engine.

    Args:
        engine: of this rank; it has nothing of the policy yet.
        owner: has ``policy``, ``policy_forward`` and ``device``, as an ``RLModule`` has.
        dtype: of the engine's weights.
        optimizers: returns those whose state makes room for the engine.
        sleep: give the engine's memory to the trainer at the trainer's turn; None: where both do not fit, which is
            known once ``steps`` has grown.
        steps: returns how many optimizer steps were done.
        offload: give the optimizer's memory to the engine at the engine's turn; None: where both do not fit.
        shapes: what the engine takes; None: all that the policy has.
        phase: what a push, and all around it, is to happen in.
    """

    def __init__(
        self,
        engine: Engine,
        owner: Any,
        dtype: torch.dtype,
        *,
        optimizers: Callable[[], Iterable[torch.optim.Optimizer]],
        sleep: bool | None = True,
        steps: Callable[[], int] = lambda: 0,
        offload: bool | None = None,
        shapes: Shapes | None = None,
        phase: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext(),
    ) -> None:
        self.engine, self._owner, self._dtype = engine, owner, dtype
        self._optimizers, self._sleep = optimizers, sleep
        self._steps, self._steps_before = steps, steps()
        self._on_gpu = owner.device.type == "cuda"
        self._offload, self._state, self._engine_bytes = offload, StateOffload(), 0
        self._canary = Canary(owner.policy.config.get_text_config().vocab_size)
        self._shapes, self._phase = shapes, phase
        self._weights = PolicyWeights(owner.policy, dtype, shapes)
        self._weights_gone, self._compared = True, False
        self._asleep = sleep is not False
        if self._asleep:
            before = self._free_bytes()
            engine.sleep()
            self._engine_bytes = self._free_bytes() - before

    def to_engine(self, stale: bool) -> float:
        """Begin the engine's turn; return the seconds that a push took, 0.0 where there was none.

        Args:
            stale: the engine's weights are older than they should be.

        Raises:
            WeightSyncError: the engine does not hold what was pushed, or a tensor's shape is another one (it is named,
                and nothing is sent).
        """
        seconds = 0.0
        pushing = stale or self._weights_gone
        if pushing and self._shapes is not None:
            check_shapes(self._owner.policy, self._shapes)
        self._make_room()
        try:
            with self._phase("swap"):
                if self._asleep:
                    self.engine.wake_weights()
                expected: list[Tensor] = []
                if pushing:
                    started = time.perf_counter()
                    with self._phase("push"):
                        expected = self._push()
                    seconds = time.perf_counter() - started
                if self._asleep:
                    self.engine.wake_cache()
                if expected:
                    self._canary.check(self.engine, expected, self._dtype)
                    self._compared = True
                self._asleep = False
        except BaseException:
            self._weights_gone, self._compared = True, False
            self.take_back()
            raise
        return seconds

    def to_trainer(self) -> None:
        """Begin the trainer's turn."""
        with self._phase("swap"):
            if self._sleep is not False and not self._fit_together():
                self._weights_gone, self._asleep = self.engine.sleep(), True
            self.take_back()

    def _push(self) -> list[Tensor]:
        # What the engine computes with its weights stays the same, and what it holds is compared at every push.
        expected = [] if self._compared else self._canary.trainer_logprobs(self._owner)
        self.engine.load_weights(self._weights)
        self._weights_gone = False
        return expected

    def _make_room(self) -> None:
        if not self._on_gpu or self._offload is False or not (self._asleep or self._offload):
            return
        torch.cuda.empty_cache()
        if self._offload or self._free_bytes() < self._engine_bytes + _MARGIN_BYTES:
            self._state.out(self._optimizers())
            torch.cuda.empty_cache()

    def _fit_together(self) -> bool:
        """Whether every rank has room for a turn of the trainer beside the engine, as it is awake now."""
        if self._sleep or not self._on_gpu:
            return False
        # A resumed run has an optimizer's state before it has trained, and so shown what training takes.
        known = self._steps() > self._steps_before and not self._state.is_out
        return all(all_objects(known and self._has_room_to_train()))

    def _has_room_to_train(self) -> bool:
        device = self._owner.device
        # The most that ever was in use beside what is held now.
        most = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
        needed = _ROOM * most + _MARGIN_BYTES
        if self._free_bytes() < needed:
            torch.cuda.empty_cache()  # what torch keeps for later may be kept for the engine's graphs alone
        return self._free_bytes() >= needed

    def _free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self._owner.device)[0] if self._on_gpu else 0

    def take_back(self) -> None:
        """Have the optimizer's state on the device again, whatever became of the engine."""
        if self._state.is_out:
            self._state.back(self._optimizers(), self._owner.device)
