"""FSDP2 over all ranks, and the contract of a strategy that also generates."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from typing_extensions import override

from lightrl.arguments import check_at_least_one
from lightrl.distributed import all_objects
from lightrl.engines.session import RoundSession, Session
from lightrl.fsdp import PRECISIONS, check_learning_rate, engine_dtype, fits_whole, forget_step, shard_model
from lightrl.strategies.watched import WatchedStrategy

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightrl.types import Completion, Sampling


class RolloutStrategy(WatchedStrategy):
    """Shards the policy over all ranks (FSDP2, also on one) and generates with its current weights.

    Args:
        sync_every: optimizer steps between two pushes of the weights into the engine.
        defer_grad_sync: reduce gradients once a step and not once a micro-batch: less communication, but each GPU holds
            a full unsharded gradient. None: where all layers and the gradient take a quarter of the device's memory at
            most. One rank always does so: it holds all of it anyway.
        reshard_after_forward: free gathered layers after their forward pass and gather them again in the backward;
            otherwise they are gathered once a step. None: as goes with ``defer_grad_sync=None``.
        kwargs: ``timeout`` of :class:`WatchedStrategy`, ``save_in_background`` of :class:`SavingStrategy`,
            ``process_group_backend`` of Lightning's ``ModelParallelStrategy``.

    Raises:
        ValueError: ``sync_every`` is below 1, the precision is not one of 32-true, bf16-true, bf16-mixed, or bf16-true
            meets a learning rate below 1e-5.
    """

    overlaps = False
    """Whether rollouts are sampled ahead of training, by a producer."""

    def __init__(
        self,
        sync_every: int = 1,
        defer_grad_sync: bool | None = None,
        reshard_after_forward: bool | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_at_least_one(sync_every=sync_every)
        self.sync_every = sync_every
        self.defer_grad_sync = defer_grad_sync
        self.reshard_after_forward = reshard_after_forward
        self.seconds: dict[str, float] = {}
        """Wall time of the stages of the last ``generate``, by metric name."""
        self._trainer: pl.Trainer | None = None
        self._pushed_version: int | None = None  # None: the engine has nothing of ours yet
        self._due_since: int | None = None  # the step from which sync_every counts
        self._keeps_layers = self._defers = False
        self._sharded: list[nn.Module] = []

    # -- what a rollout source needs ----------------------------------------------------------------------------------

    @abstractmethod
    def generate(self, prompts: list[list[int]], sampling: Sampling) -> list[list[Completion]]:
        """Sample ``sampling.num_completions`` completions of each prompt with weights at most ``sync_every`` steps old.

        All ranks call it together, each with its own prompts (perhaps none).
        """

    def sync_weights(self) -> None:
        """Push the weights if they are ``sync_every`` steps ahead of the engine's (all ranks call it together).

        Strategies that take turns push while they generate, and have nothing to do here.
        """

    @contextmanager
    def session(self, sampling: Sampling) -> Iterator[Session]:
        """Generate with requests that come one by one, as :meth:`generate` does; all ranks enter and leave together."""
        yield RoundSession(self.generate, sampling)

    @property
    def policy_version(self) -> int:
        """Optimizer steps done by the weights that the engine holds."""
        return self._pushed_version or 0

    def mark_weights_dirty(self) -> None:
        """Have the next ``generate`` push the weights first: something other than an optimizer step changed them."""
        self._pushed_version = None

    @property
    def _engine_dtype(self) -> torch.dtype:
        return engine_dtype(str(self.precision_plugin.precision))

    def _is_stale(self) -> bool:
        """Whether to push now. Training alone moves the schedule: whether somebody validates must not change it."""
        assert self._trainer is not None
        now = self._trainer.global_step
        due = self._pushed_version is None or self._due_since is None or now - self._due_since >= self.sync_every
        if due and self._trainer.training:
            self._due_since = now
        return due and self._pushed_version != now

    def _weights_synced(self, seconds: float) -> None:
        assert self._trainer is not None
        self._pushed_version = self._trainer.global_step
        module = self._trainer.lightning_module
        for listener in (*self._trainer.callbacks, module):  # type: ignore[attr-defined]
            hook = getattr(listener, "on_weights_synced", None)
            if hook is not None:
                arguments = (self._pushed_version, seconds)
                hook(*arguments) if listener is module else hook(self._trainer, module, *arguments)

    # -- Lightning ----------------------------------------------------------------------------------------------------

    @override
    def _configure_launcher(self) -> None:
        # The end of Trainer.__init__, and the first place that knows accelerator and precision: refuse before any work.
        self._check_precision()
        if self.num_processes * self.num_nodes > 1:
            super()._configure_launcher()

    def _check_precision(self) -> None:
        flag = str(self.precision_plugin.precision)
        if flag not in PRECISIONS:
            raise ValueError(
                f"precision={flag!r} is not supported by {type(self).__name__}: use {', '.join(PRECISIONS)}"
            )
        if self.root_device.type == "mps":
            raise ValueError("the MPS accelerator has no FSDP2: use Trainer(accelerator='cpu')")
        # Lightning's own plugins change autocast or the default dtype around float32 arithmetic; FSDP2 casts instead.
        plain = Precision()
        plain.precision = flag  # type: ignore[assignment]
        self.precision_plugin = plain

    @override
    def setup_environment(self) -> None:
        lr = getattr(self.lightning_module, "lr", None)
        check_learning_rate(lr, str(self.precision_plugin.precision))
        self._tensor_parallel_size = 1
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()
        # One file is easier to carry than a folder, and one process can always write it.
        self._save_distributed_checkpoint = self.world_size > 1

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            _check_callbacks(trainer)
        self._trainer = trainer
        self._pushed_version = self._due_since = None
        module: Any = self.lightning_module
        if not hasattr(module, "policy"):
            raise ValueError(
                f"{type(module).__name__} has no `policy`: {type(self).__name__} trains a lightrl.RLModule"
            )
        self._choose_what_to_keep(module.policy)
        self._sharded = []
        self._shard(module.policy, keep=self._keeps_layers)
        if getattr(module, "reference", None) is not None:
            self._shard(module.reference, offload=module.reference_device == "cpu")
        for companion in getattr(module, "companions", list)():
            self._shard(companion)
        super().setup(trainer)

    def _choose_what_to_keep(self, policy: nn.Module) -> None:
        room = all(all_objects(fits_whole(policy, str(self.precision_plugin.precision), self.root_device)))
        alone = self.world_size == 1
        self._keeps_layers = alone or (room if self.reshard_after_forward is None else not self.reshard_after_forward)
        self._defers = alone or (room if self.defer_grad_sync is None else self.defer_grad_sync)

    def _shard(self, model: nn.Module, *, keep: bool = False, offload: bool = False) -> None:
        shard_model(
            model,
            self.device_mesh["data_parallel"],
            str(self.precision_plugin.precision),
            self.root_device,
            reshard_after_forward=not keep,
            offload=offload,
        )
        self._sharded.append(model)

    def sync_gradients(self, last: bool) -> None:
        """Say whether the coming micro-batch is the step's last, after which gradients are reduced and layers freed."""
        policy: Any = self.lightning_module.policy  # type: ignore[union-attr]
        # Said each time: an earlier run of this module may have ended in the middle of a step, or kept other things.
        policy.set_reshard_after_backward(last or not self._keeps_layers)
        policy.set_requires_gradient_sync(last or not self._defers)
        policy.set_is_last_backward(last or not self._defers)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        loaded = super().load_checkpoint(checkpoint_path, weights_only)
        self.mark_weights_dirty()
        return loaded

    @override
    def on_exception(self, exception: BaseException) -> None:
        for model in self._sharded:
            forget_step(model)
        super().on_exception(exception)


def _check_callbacks(trainer: pl.Trainer) -> None:
    """Refuse callbacks of Lightning's that would spoil a run.

    Raises:
        ValueError: there is one.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        name = type(callback).__name__
        if isinstance(callback, StochasticWeightAveraging | WeightAveraging):
            raise ValueError(
                f"{name} cannot average weights that FSDP2 has sharded: take the mean of exported checkpoints instead"
            )
        if isinstance(callback, GradientAccumulationScheduler) and set(callback.scheduling.values()) != {1}:
            raise ValueError(
                f"{name}({callback.scheduling}): one batch is already one whole optimizer step. Its size is the "
                "datamodule's prompts_per_step"
            )
