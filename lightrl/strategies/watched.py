"""The half of a strategy that lets no failure pass in silence: phases with deadlines, and a watch over all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from typing_extensions import override

from lightrl.ledger import is_out_of_memory, memory_ledger
from lightrl.phases import SECONDS, Phases
from lightrl.signals import Signals
from lightrl.strategies.saving import SavingStrategy
from lightrl.watch import Watch

if TYPE_CHECKING:
    import lightning.pytorch as pl


_LONGEST = 365 * 86400.0  # what a process group takes for no limit


class WatchedStrategy(SavingStrategy):
    """Ends all ranks when one of them fails, hangs or is killed.

    Args:
        timeout: seconds that a phase may take (infinity: no limit), or by phase, such as ``{"generate": 600, "reward":
            120}``; see :data:`lightrl.phases.PHASES`.
        heartbeat_timeout: seconds without a sign of life after which a rank counts as gone (that a process was killed
            is noticed at once on its own host).
        grace_period: seconds after SIGTERM in which the step must end and be saved; then the run ends without.
        kwargs: see :class:`SavingStrategy`.

    Raises:
        ValueError: ``timeout`` names no phase, or a limit is not above 0.
    """

    def __init__(
        self,
        timeout: float | timedelta | Mapping[str, float] = SECONDS,
        heartbeat_timeout: float = 60.0,
        grace_period: float = 60.0,
        **kwargs: Any,
    ) -> None:
        self.phases = Phases(timeout)
        for name, seconds in {"heartbeat_timeout": heartbeat_timeout, "grace_period": grace_period}.items():
            if not seconds > 0:
                raise ValueError(f"{name}={seconds} must be above 0: it is seconds")
        self.heartbeat_timeout, self.grace_period = heartbeat_timeout, grace_period
        # Collectives give up last: they cannot say what went wrong.
        last = min(max(self.phases.limits.values()) + 60, _LONGEST)
        super().__init__(timeout=timedelta(seconds=last), **kwargs)
        self._watch: Watch | None = None
        self._signals: Signals | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Be in a phase, with its deadline, inside the block; out of memory, its error says who holds how much."""
        if self._watch is not None and name == "train":
            self._watch.step = self.lightning_module.global_step  # type: ignore[union-attr]
        try:
            with self.phases.inside(name):
                yield
        except RuntimeError as error:
            if is_out_of_memory(error) and not getattr(error, "__notes__", None):
                table = memory_ledger(self._memory_holders(), self.root_device)
                error.add_note(f"Out of memory in phase {name!r}, with on {self.root_device}:\n{table}")
            raise

    def _memory_holders(self) -> dict[str, list[Tensor | None]]:
        module: Any = self.lightning_module
        policy: list[Any] = list(getattr(module, "policy", torch.nn.Module()).parameters())
        reference = getattr(module, "reference", None)
        state = [v for o in self.optimizers for held in o.state.values() for v in held.values()]
        return {
            "weights": [*policy],
            "gradients": [p.grad for p in policy],
            "optimizer state": [v for v in state if isinstance(v, Tensor)],
            "reference": list(reference.parameters()) if reference is not None else [],
        }

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        assert self.cluster_environment is not None
        self._end_watch()
        address = self.cluster_environment.main_address
        self._watch = Watch(self.phases, address, self.heartbeat_timeout, self._last_words)
        self._watch.start()

    def _last_words(self) -> None:
        for logger in self.lightning_module.trainer.loggers if self.lightning_module else ():
            logger.finalize("failed")

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if not any(isinstance(c, _FirstToHear) for c in trainer.callbacks):  # type: ignore[attr-defined]
            trainer.callbacks.insert(0, _FirstToHear())  # type: ignore[attr-defined]
        super().setup(trainer)

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._take_signals()

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._take_signals()

    def _take_signals(self) -> None:
        trainer = self.lightning_module.trainer  # type: ignore[union-attr]
        if trainer.state.fn == TrainerFn.FITTING and self._signals is None and self._watch is not None:
            self._signals = Signals(trainer, self.grace_period, self._watch)

    def step_ended(self) -> None:
        """Do what signals asked for in the meantime (all ranks call it together).

        Raises:
            SIGTERMException: it was to end; a checkpoint is saved.
        """
        if self._signals is not None:
            self._signals.step_ended()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.phase("train"):
            return super().training_step(*args, **kwargs)

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.phase("train"):
            return super().optimizer_step(*args, **kwargs)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        with self.phase("save"):
            super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        with self.phase("load"):
            return super().load_checkpoint(checkpoint_path, weights_only)

    def heard_of(self, error: BaseException) -> None:
        """Tell the other ranks at once that this one goes down."""
        if self._watch is not None:
            self._watch.raised(error)

    @override
    def on_exception(self, exception: BaseException) -> None:
        self.heard_of(exception)
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            self._end_watch()

    def _end_watch(self) -> None:
        watch, self._watch, self._signals = self._watch, None, None
        if watch is not None:
            watch.stop()


class _FirstToHear(Callback):
    """Before other callbacks do things on an exception that take all ranks, such as saving."""

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, WatchedStrategy)
        strategy.heard_of(exception)
