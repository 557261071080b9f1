"""Faults on purpose: a run that is killed, broken or held up at a named place.

A fault strikes once, in one process, the first time that the place is reached after so many optimizer steps.
"""

from __future__ import annotations

import io
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from lightning.pytorch import Callback

SIGNALS = {
    "kill": signal.SIGKILL,
    "freeze": signal.SIGSTOP,
    "terminate": signal.SIGTERM,
    "interrupt": signal.SIGINT,
    "requeue": signal.SIGUSR1,
}
KINDS = ("raise", "hang", *SIGNALS)
PLACES = {
    "generate": ("before", "during", "after"),
    "reward": ("before", "during", "after"),
    "micro_batch": ("before", "during", "after"),
    "optimizer": ("before", "during", "after"),
    "push": ("before", "during", "after"),
    "validation": ("before", "during", "after"),
    "save": ("before", "during", "after"),
}


class BoomError(RuntimeError):
    """What a fault of kind ``raise`` raises."""


@dataclass(frozen=True)
class Fault:
    """What happens, where and when."""

    kind: str
    phase: str
    moment: str
    step: int
    """Optimizer steps done."""
    rank: int = 0
    micro_batch: int = 0
    """Which one, where the phase is ``micro_batch``."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS or self.moment not in PLACES.get(self.phase, ()):
            raise ValueError(f"no such fault: {asdict(self)}")

    def __str__(self) -> str:
        which = f" {self.micro_batch}" if self.phase == "micro_batch" else ""
        return f"{self.kind} {self.moment} {self.phase}{which}"


def faults_of(kind: str, micro_batches: int, step: int, rank: int) -> list[Fault]:
    """A fault for every place of step ``step``, which is cut into so many micro-batches."""
    found = []
    for phase, moments in PLACES.items():
        parts = range(micro_batches) if phase == "micro_batch" else (0,)
        for part, moment in itertools.product(parts, moments):
            at = step - 1 if phase == "optimizer" and moment != "after" else step  # not counted until it is done
            found.append(Fault(kind, phase, moment, at, rank, part))
    return found


class Saboteur(Callback):
    """Has ``fault`` strike in the run that it is a callback of; None: nothing does, and places are still counted."""

    def __init__(self, fault: Fault | None) -> None:
        self.fault, self.reached = fault, set[tuple[str, str, int]]()
        self._trainer: Any = None

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self._trainer, strategy, data = trainer, trainer.strategy, trainer.datamodule
        if not strategy.overlaps:
            self._around(strategy, "generate", "generate")
        self._around(data.rewards, "score", "reward")
        self._around(strategy, "optimizer_step", "optimizer")
        self._around(module, "configure_gradient_clipping", None, before=("optimizer", "during"))
        self._around(module, "validation_step", None, before=("validation", "during"))
        self._around(trainer.fit_loop.epoch_loop.val_loop, "run", "validation")
        self._around(strategy, "save_checkpoint", "save")
        self._in_micro_batches(module)
        if strategy.overlaps:
            self._around(data._stream._ahead, "next_batch", "generate")
            self._around(strategy._publisher, "push", "push")
        else:
            self._in_generation(strategy)
            self._in_pushes(strategy)
        self._in_files()

    def reach(self, phase: str, moment: str, micro_batch: int = 0) -> None:
        """Say that a place is reached."""
        self.reached.add((phase, moment, micro_batch))
        fault = self.fault
        if fault is None or (fault.phase, fault.moment, fault.micro_batch) != (phase, moment, micro_batch):
            return
        if self._trainer.global_step != fault.step or self._trainer.global_rank != fault.rank:
            return
        self.fault = None
        print(f"fault: {fault} at step {fault.step} on rank {fault.rank}, at {time.time()}", flush=True)
        strike(fault.kind)

    def _around(self, owner: Any, name: str, phase: str | None, before: tuple[str, str] | None = None) -> None:
        work = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.reach(*(before or (phase, "before")))
            result = work(*args, **kwargs)
            if phase:
                self.reach(phase, "after")
            return result

        setattr(owner, name, wrapped)

    def _in_micro_batches(self, module: Any) -> None:
        micro_loss, loss, count = module._micro_loss, module.loss, itertools.count()

        def of_micro_batch(*args: Any, last: bool) -> Any:
            nonlocal count
            self._part = next(count)
            self.reach("micro_batch", "before", self._part)
            result = micro_loss(*args, last=last)
            self.reach("micro_batch", "after", self._part)
            count = itertools.count() if last else count
            return result

        def noted(*args: Any) -> Any:
            self.reach("micro_batch", "during", self._part)
            return loss(*args)

        module._micro_loss, module.loss = of_micro_batch, noted

    def _in_generation(self, strategy: Any) -> None:
        """``during`` is before the second token."""
        engine, count = strategy._engine, itertools.count()
        model = getattr(engine, "policy", None)
        generate = engine.generate

        def counted(*_: Any, **__: Any) -> None:
            if next(count) == 1:
                self.reach("generate", "during")

        def with_count(*args: Any) -> Any:
            nonlocal count
            count = itertools.count()
            if model is not None:
                with model.register_forward_pre_hook(counted):
                    return generate(*args)
            core = engine.llm.llm_engine
            step = core.step
            core.step = lambda: (counted(), step())[1]
            try:
                return generate(*args)
            finally:
                core.step = step

        engine.generate = with_count

    def _in_pushes(self, strategy: Any) -> None:
        load = strategy._engine.load_weights

        def wrapped(weights: Any) -> None:
            self.reach("push", "before")
            load(_Watched(weights, lambda: self.reach("push", "during")))
            self.reach("push", "after")

        strategy._engine.load_weights = wrapped

    def _in_files(self) -> None:
        """``during`` a save is with half of the first file written."""
        save = torch.save

        def half(value: Any, file: Any, *args: Any, **kwargs: Any) -> None:
            whole = io.BytesIO()
            save(value, whole, *args, **kwargs)
            data = whole.getvalue()
            if not hasattr(file, "write"):
                with open(file, "wb") as opened:
                    self._write(opened, data)
            else:
                self._write(file, data)

        torch.save = half

    def _write(self, file: Any, data: bytes) -> None:
        file.write(data[: len(data) // 2])
        file.flush()
        self.reach("save", "during")
        file.write(data[len(data) // 2 :])


class _Watched:
    """Weights of which a fault may strike the reading."""

    def __init__(self, weights: Any, reached: Callable[[], None]) -> None:
        self.weights, self.reached = weights, reached

    def outline(self) -> Any:
        return self.weights.outline()

    def held(self) -> Any:
        found = self.weights.held()
        if found is not None:
            self.reached()
        return found

    def __iter__(self) -> Iterator[Any]:
        for i, weight in enumerate(self.weights):
            if i == 1:
                self.reached()
            yield weight


def strike(kind: str) -> None:
    """Send this process a signal, raise, or do nothing for ever."""
    if kind in SIGNALS:
        os.kill(os.getpid(), SIGNALS[kind])
        return
    if kind == "raise":
        raise BoomError("boom")
    while True:
        time.sleep(3600)


def rewarded(saboteur: Saboteur, reward: Callable[..., float]) -> Callable[..., float]:
    """``reward``, which a fault may strike in."""

    def struck(completion: str, ground_truth: Any = None) -> float:
        saboteur.reach("reward", "during")
        return reward(completion, ground_truth)

    return struck
