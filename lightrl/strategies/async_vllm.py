"""Generation and training on devices of their own, at the same time."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightrl.arguments import check_at_least_one, check_count
from lightrl.distributed import all_objects, from_rank_zero, rank
from lightrl.engines.base import WeightSyncError
from lightrl.engines.messages import EngineSpec
from lightrl.partial import completion
from lightrl.pools.launchers import Launcher
from lightrl.pools.outbox import Outbox, Transport, check_transport
from lightrl.pools.placement import make_launcher
from lightrl.pools.pool import EnginePool
from lightrl.pools.publisher import Publisher
from lightrl.producer import RolloutProducer, Work, request
from lightrl.queue import RolloutQueue
from lightrl.rng import derive_seed
from lightrl.strategies.base import RolloutStrategy
from lightrl.strategies.colocated import tokens_needed

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightrl.types import Completion, RolloutGroup, Sampling


_MARGIN_SECONDS = 120


class AsyncVLLMStrategy(RolloutStrategy):
    """Engines in processes of their own generate ahead of training, at most ``max_staleness`` steps: ``"async_vllm"``.

    Staleness is counted in optimizer steps, from the oldest weights that sampled any token of a rollout to its first
    use. Weights are pushed while requests run: later tokens come from the new ones, and each token has the version and
    the logprob of the weights that sampled it. Give the module a ``correction`` (:mod:`lightrl.corrections`) where
    ``max_staleness`` is above 0.

    Args:
        max_staleness: 0 waits for each push before it samples, as the colocated strategies do.
        pool: who starts the engines: ``"local"`` (child processes), ``"ray"`` (actors on a Ray cluster), or the
            addresses of engines that run already (``python -m lightrl.engines.server``).
        num_engines: engines of ``"local"`` and ``"ray"``.
        rollout_devices: GPUs of the engines of ``"local"``; None: those that the trainer does not use.
        tensor_parallel_size: GPUs of each engine.
        max_model_len: longest prompt + completion in tokens; None: what the datamodule needs.
        engine_args: further arguments of ``vllm.LLM``.
        recompute_kv: after a push, compute the attention states of running requests again under the new weights;
            False goes on with the old ones, which is faster and a little further from the policy.
        transport: how weights get to the engines: ``"cuda_ipc"`` (they read the memory of rank 0's GPU, over NVLink
            from another; on one host), or ``"wire"`` (through host memory and the engines' sockets; anywhere). None:
            ``"cuda_ipc"`` for engines on GPUs that this run starts on this host.
        max_in_flight: prompts that may be in work at once; None: as many as ``max_staleness`` allows.
        oversample: begin this many times the prompts of a step and take the first to end. What is left is sampled again
            for a later step. Biased: prompts with short completions are trained on more often and earlier.
        max_restarts: how often each engine may be lost and started again within an hour; 0 ends the run at the first
            loss.
        start_timeout: seconds that an engine may take to stand.
        push_timeout: seconds that an engine may take to load weights before it counts as lost.
        answer_timeout: seconds that a serving engine may stand still before it counts as lost. (One whose process or
            host is gone or stopped is noticed within five.)
        rollout_timeout: seconds that training waits for a batch. Phases (``timeout``) get more time than these waits.
        sync_every: see :class:`RolloutStrategy`.
        kwargs: see :class:`RolloutStrategy`.

    Raises:
        ValueError: an argument is out of range, or ``sync_every`` leaves weights older than ``max_staleness`` allows.
    """

    overlaps = True

    def __init__(
        self,
        max_staleness: int = 1,
        pool: Literal["local", "ray"] | list[str] = "local",
        num_engines: int = 1,
        rollout_devices: list[int] | None = None,
        tensor_parallel_size: int = 1,
        max_model_len: int | None = None,
        engine_args: dict[str, Any] | None = None,
        recompute_kv: bool = True,
        transport: Transport | None = None,
        max_in_flight: int | None = None,
        oversample: float = 1.0,
        max_restarts: int = 3,
        start_timeout: float = 600.0,
        push_timeout: float = 300.0,
        answer_timeout: float = 60.0,
        rollout_timeout: float = 1800.0,
        sync_every: int = 1,
        **kwargs: Any,
    ) -> None:
        # Each wait has its own error, which says more than that a phase, or then a collective, took too long.
        waits = {
            "setup": start_timeout * (1 + max_restarts),
            "push": start_timeout + push_timeout,
            "generate": rollout_timeout,
        }
        timeout = kwargs.pop("timeout", {})
        if isinstance(timeout, Mapping):
            timeout = {name: seconds + _MARGIN_SECONDS for name, seconds in waits.items()} | dict(timeout)
        super().__init__(sync_every=sync_every, timeout=timeout, **kwargs)
        check_count("max_staleness", max_staleness)
        if sync_every > max_staleness + 1:
            raise ValueError(
                f"sync_every={sync_every} leaves weights {sync_every - 1} steps old, more than "
                f"max_staleness={max_staleness}: lower the one or raise the other"
            )
        check_at_least_one(num_engines=num_engines, tensor_parallel_size=tensor_parallel_size)
        if isinstance(pool, str) and pool not in ("local", "ray"):
            raise ValueError(f"pool={pool!r} is neither 'local', 'ray' nor a list of addresses")
        check_transport(transport)
        RolloutQueue(1, max_staleness, oversample=oversample)
        self.max_staleness, self.pool_kind, self.num_engines = max_staleness, pool, num_engines
        self.rollout_devices, self.engine_tp_size = rollout_devices, tensor_parallel_size
        self.max_model_len, self.engine_args, self.recompute_kv = max_model_len, engine_args or {}, recompute_kv
        self.max_in_flight, self.oversample, self.max_restarts = max_in_flight, oversample, max_restarts
        self.start_timeout, self.push_timeout, self.rollout_timeout = start_timeout, push_timeout, rollout_timeout
        self.answer_timeout, self.transport = answer_timeout, transport
        self._publisher: Publisher | None = None
        self._pool: EnginePool | None = None
        self._producer: RolloutProducer | None = None
        self._serial = itertools.count()

    # -- set-up -------------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        module: Any = self.lightning_module
        if self.max_staleness and getattr(module, "correction", None) is None and trainer.training:
            rank_zero_warn(
                f"max_staleness={self.max_staleness} trains on rollouts of older weights and the module has no "
                "correction for that: RLModule(..., correction=TruncatedToken()) weighs them (lightrl.corrections)"
            )
        max_model_len = self.max_model_len or tokens_needed(trainer)
        outbox = Outbox(self.transport, self.root_device, self.pool_kind)
        self._publisher = Publisher(module, self._engine_dtype, outbox, self.recompute_kv)
        with self.phase("setup"):
            from_rank_zero(lambda: self._start(module, max_model_len))

    def _start(self, module: Any, max_model_len: int | None) -> None:
        from lightrl.engines.vllm import engine_config

        spec = EngineSpec(
            config=engine_config(module.policy).to_dict(),
            dtype=str(self._engine_dtype).removeprefix("torch."),
            max_model_len=max_model_len,
            tensor_parallel_size=self.engine_tp_size,
            # Otherwise a token that is under way while weights change would be taken for one of the new policy.
            engine_args=self.engine_args if self.recompute_kv else {"async_scheduling": False} | self.engine_args,
            code_path=str(module.policy.config.name_or_path) if module.trust_remote_code else None,
        )
        self._pool = EnginePool(
            self._pool_launcher(),
            spec,
            seed=torch.initial_seed() % 2**31,
            max_restarts=self.max_restarts,
            start_timeout=self.start_timeout,
            push_timeout=self.push_timeout,
            answer_timeout=self.answer_timeout,
        )
        count = self._pool.launcher.num_engines
        rank_zero_info(f"waiting for {count} engine{'s' if count > 1 else ''} to stand, which takes up to a minute")
        self._pool.start()

    def _pool_launcher(self) -> Launcher:
        used = [d.index for d in self.parallel_devices or [] if d.type == "cuda" and d.index is not None]
        gpus = self.engine_tp_size if used else 0
        return make_launcher(self.pool_kind, self.num_engines, gpus, used, self.rollout_devices, self.start_timeout)

    # -- weights ------------------------------------------------------------------------------------------------------

    @override
    def sync_weights(self) -> None:
        if not self._is_stale():
            return
        assert self._trainer is not None
        assert self._publisher is not None
        started = time.perf_counter()
        self._publisher.push(
            self._require_pool, self._trainer.global_step, verify=self._pushed_version is None, phase=self.phase
        )
        seconds = time.perf_counter() - started
        self.seconds["time/weight_sync"] = seconds
        self._weights_synced(seconds)

    def _require_pool(self) -> EnginePool:
        if self._pool is None:
            raise WeightSyncError("there are no engines: setup has not run, or the run has ended")
        return self._pool

    # -- rollouts -----------------------------------------------------------------------------------------------------

    @override
    def generate(self, prompts: list[list[int]], sampling: Sampling) -> list[list[Completion]]:
        self.sync_weights()
        everyone = all_objects((prompts, sampling.prompt_seeds))
        started = time.perf_counter()
        with self.phase("generate"):
            found: list[list[list[Completion]]] = from_rank_zero(lambda: self._generate(everyone, sampling))
        self.seconds["time/generate"] = time.perf_counter() - started
        return found[rank()]

    def _generate(
        self, everyone: list[tuple[list[list[int]], tuple[int, ...]]], sampling: Sampling
    ) -> list[list[list[Completion]]]:
        pool = self._require_pool()

        async def group(ids: list[int], seed: int | None) -> list[Completion]:
            n = sampling.num_completions
            seeds = [None if seed is None else derive_seed(seed, i) for i in range(n)]
            requests = [request(f"now.{next(self._serial)}", ids, sampling, s) for s in seeds]
            return [completion(o) for o in await pool.generate(requests)]

        async def of_rank(prompts: list[list[int]], seeds: tuple[int, ...]) -> list[list[Completion]]:
            own = seeds or [None] * len(prompts)
            return list(await asyncio.gather(*(group(p, s) for p, s in zip(prompts, own, strict=True))))

        async def all_groups() -> list[list[list[Completion]]]:
            return list(await asyncio.gather(*(of_rank(*theirs) for theirs in everyone)))

        return pool.call(all_groups(), timeout=self.rollout_timeout, what="generation")

    def produce(
        self, work: Work, prompts_per_step: int, steps_per_rollout: int, state: dict[str, Any] | None
    ) -> RolloutProducer:
        """Begin to sample ahead, on rank 0.

        Args:
            work: what to sample, and how to score it.
            prompts_per_step: groups in a batch.
            steps_per_rollout: optimizer steps that each batch is used for.
            state: of a producer, to go on from.
        """
        assert self._trainer is not None
        queue: RolloutQueue[RolloutGroup] = RolloutQueue(
            prompts_per_step,
            self.max_staleness,
            steps_per_rollout,
            first_step=self._trainer.global_step,
            max_in_flight=self.max_in_flight,
            oversample=self.oversample,
        )
        self._producer = RolloutProducer(self._require_pool(), queue, work, self.rollout_timeout)
        if state:
            self._producer.restore(state)
        self._producer.start()
        return self._producer

    # -- the end ------------------------------------------------------------------------------------------------------

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._close()
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        self._close()
        super().teardown()

    def _close(self) -> None:
        producer, self._producer = self._producer, None
        pool, self._pool = self._pool, None
        self._publisher = None
        try:
            if producer is not None:
                producer.stop()
        finally:
            if pool is not None:
                pool.close()
