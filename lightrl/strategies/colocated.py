"""Generation and training take turns on the same devices."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from lightrl.arguments import check_at_least_one
from lightrl.distributed import all_objects
from lightrl.engines.base import Engine
from lightrl.engines.hf import HFEngine
from lightrl.strategies.base import RolloutStrategy
from lightrl.swap import Swap
from lightrl.weights.canary import LONGEST

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightrl.engines.session import Session
    from lightrl.types import Completion, Sampling


class ColocatedVLLMStrategy(RolloutStrategy):
    """Every rank holds its shard of the trainer and, in the same process, vLLM: ``"colocated_vllm"``.

    Before each rollout: trainer state out, engine weights in, push, KV cache in, generate, and all of it back.

    Args:
        tensor_parallel_size: ranks that share one engine; a divisor of the number of ranks.
        max_model_len: longest prompt + completion of the engine, in tokens; None: what the datamodule needs.
        engine_args: further arguments of ``vllm.LLM``, for example ``{"gpu_memory_utilization": 0.5}``.
        sleep: give the engine's memory to the trainer between rollouts (needs ``sync_every=1``); None: where both do
            not fit, which is known after the first step.
        offload_optimizer: give the optimizer's memory to the engine during rollouts; None: where both do not fit.
        sync_every: see :class:`RolloutStrategy`.
        kwargs: see :class:`RolloutStrategy`.

    Raises:
        ValueError: vLLM is not installed, ``sleep`` meets ``sync_every > 1``, or the ranks do not divide into groups.
    """

    def __init__(
        self,
        tensor_parallel_size: int = 1,
        max_model_len: int | None = None,
        engine_args: dict[str, Any] | None = None,
        sleep: bool | None = None,
        offload_optimizer: bool | None = None,
        sync_every: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(sync_every=sync_every, **kwargs)
        if sleep and sync_every > 1:
            raise ValueError(
                f"sync_every={sync_every} needs an engine that keeps older weights: leave sleep out, or sync_every=1"
            )
        check_at_least_one(tensor_parallel_size=tensor_parallel_size)
        self.rollout_tp_size = tensor_parallel_size
        self.max_model_len = max_model_len
        self.engine_args = engine_args
        self.sleep = False if sync_every > 1 else sleep
        self.offload_optimizer = offload_optimizer
        self._engine: Engine | None = None
        self._swap: Swap | None = None

    @override
    def _configure_launcher(self) -> None:
        self._check_ranks()  # before other processes are started
        super()._configure_launcher()

    def _check_ranks(self) -> None:
        ranks = self.num_nodes * self.num_processes
        if ranks % self.rollout_tp_size:
            raise ValueError(
                f"{ranks} devices do not divide into groups of tensor_parallel_size={self.rollout_tp_size}"
            )

    @override
    def setup_environment(self) -> None:
        self._check_engine()
        super().setup_environment()

    def _check_engine(self) -> None:
        from lightrl.engines import compat

        compat.import_vllm()

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        module: Any = self.lightning_module
        with self.phase("setup"):
            self._engine = self._build_engine(module, self.max_model_len or tokens_needed(trainer))
        self._swap = Swap(
            self._engine,
            module,
            self._engine_dtype,
            optimizers=lambda: self.optimizers,
            sleep=self.sleep,
            steps=lambda: trainer.global_step,
            offload=self.offload_optimizer,
            phase=self.phase,
        )

    def _build_engine(self, module: Any, max_model_len: int | None) -> Engine:
        from lightrl.engines.vllm import VLLMEngine

        return VLLMEngine(
            module.policy,
            local_rank=self.local_rank,
            device=self.root_device,
            dtype=self._engine_dtype,
            tensor_parallel_size=self.rollout_tp_size,
            max_model_len=max_model_len,
            trust_remote_code=module.trust_remote_code,
            engine_args=self.engine_args,
        )

    @override
    def generate(self, prompts: list[list[int]], sampling: Sampling) -> list[list[Completion]]:
        with torch.no_grad(), self._rollout_phase() as engine, self.phase("generate"):
            return engine.generate(prompts, sampling, self.policy_version)

    @override
    @contextmanager
    def session(self, sampling: Sampling) -> Iterator[Session]:
        with (
            torch.no_grad(),
            self._rollout_phase() as engine,
            self.phase("generate"),
            engine.session(sampling, self.policy_version) as session,
        ):
            yield session

    @contextmanager
    def _rollout_phase(self) -> Iterator[Engine]:
        swap = self._swap
        assert swap is not None
        started = time.perf_counter()
        stale = self._is_stale()
        pushing = swap.to_engine(stale)
        try:
            if stale:
                self._weights_synced(pushing)
            entered = time.perf_counter()
            yield swap.engine
            generating = time.perf_counter() - entered
        except BaseException:
            swap.take_back()
            raise
        swap.to_trainer()
        swapping = time.perf_counter() - started - pushing - generating
        self.seconds = {"time/generate": generating, "time/weight_sync": pushing, "time/swap": swapping}

    @override
    def teardown(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = self._swap = None
        super().teardown()


class ColocatedHFStrategy(ColocatedVLLMStrategy):
    """The contract of :class:`ColocatedVLLMStrategy` on Hugging Face ``generate``: ``"colocated_hf"``, without vLLM.

    The policy itself generates, so that nothing has to be pushed. On several ranks all of them run the same number of
    forwards. Slow: for laptops and for checks.

    Args:
        kwargs: see :class:`RolloutStrategy`.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(sleep=False, offload_optimizer=False, **kwargs)

    @override
    def _check_ranks(self) -> None:
        if self.rollout_tp_size != 1:
            raise ValueError(
                f"tensor_parallel_size={self.rollout_tp_size}: colocated_hf generates with the policy itself"
            )

    @override
    def _check_engine(self) -> None:
        """Transformers is always there."""

    @override
    def _build_engine(self, module: Any, max_model_len: int | None) -> Engine:
        return HFEngine(module.policy, self.root_device)


def tokens_needed(trainer: pl.Trainer) -> int | None:
    """Return the longest sequence that an engine has to hold, on any rank, or None where no datamodule says it."""
    needed = getattr(getattr(trainer, "datamodule", None), "max_sequence_tokens", None)
    return None if needed is None else max(*all_objects(needed), LONGEST + 1)
