"""Trainer and engine take turns on the same device, and at its turn the engine holds the policy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lightrl.engines.base import Engine
from lightrl.weights.canary import Canary
from lightrl.weights.source import PolicyWeights, Shapes, check_shapes


class Swap:
    """What both sides do at a change of turns: trainer state out, engine weights in, push, KV cache in; and back.

    Every call is collective over the ranks that share the policy or the engine.

    Args:
        engine: of this rank; it has nothing of the policy yet.
        owner: has ``policy``, ``policy_forward`` and ``device``, as an ``RLModule`` has.
        dtype: of the engine's weights.
        optimizers: returns those whose state makes room for the engine.
        sleep: give the engine's memory to the trainer at the trainer's turn.
        offload: give the optimizer's memory to the engine at the engine's turn.
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
        sleep: bool = True,
        offload: bool = True,
        shapes: Shapes | None = None,
        phase: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext(),
    ) -> None:
        self.engine, self._owner, self._dtype = engine, owner, dtype
        self._optimizers, self._sleep = optimizers, sleep
        self._offload = offload and owner.device.type == "cuda"
        self._canary = Canary(owner.policy.config.get_text_config().vocab_size)
        self._shapes, self._phase = shapes, phase
        self._weights = PolicyWeights(owner.policy, dtype, shapes)
        self._weights_gone = True
        if sleep:
            engine.sleep()

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
                if self._sleep:
                    self.engine.wake_weights()
                expected: list[Tensor] = []
                if pushing:
                    started = time.perf_counter()
                    with self._phase("push"):
                        expected = self._push()
                    seconds = time.perf_counter() - started
                if self._sleep:
                    self.engine.wake_cache()
                if expected:
                    self._canary.check(self.engine, expected, self._dtype)
        except BaseException:
            self._weights_gone = True
            self.take_back()
            raise
        return seconds

    def to_trainer(self) -> None:
        """Begin the trainer's turn."""
        with self._phase("swap"):
            if self._sleep:
                self._weights_gone = self.engine.sleep()
            self.take_back()

    def _push(self) -> list[Tensor]:
        expected = self._canary.trainer_logprobs(self._owner)
        self.engine.load_weights(self._weights)
        self._weights_gone = False
        return expected

    def _make_room(self) -> None:
        if self._offload:
            move_optimizer_state(self._optimizers(), "cpu")
            torch.cuda.empty_cache()

    def take_back(self) -> None:
        """Have the optimizer's state on the device again, whatever became of the engine."""
        if self._offload:
            move_optimizer_state(self._optimizers(), self._owner.device)


def move_optimizer_state(optimizers: Iterable[torch.optim.Optimizer], device: torch.device | str) -> None:
    """Move what has dimensions, in place; optimizers that place their own state are left alone."""
    for optimizer in optimizers:
        if getattr(optimizer, "places_own_state", False):
            continue
        for state in optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.ndim:
                    state[key] = value.to(device)
