"""Rollouts from a process or a machine of their own: the half that trains."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info

from lightrl.distributed import from_rank_zero, rank, world_size
from lightrl.engines.messages import EngineSpec, Task
from lightrl.policy import load_tokenizer
from lightrl.pools.launchers import FixedLauncher
from lightrl.pools.outbox import Outbox
from lightrl.pools.pool import EnginePool
from lightrl.pools.publisher import Publisher
from lightrl.producer import RolloutProducer, Work
from lightrl.prompts import PromptOrder
from lightrl.queue import RolloutQueue
from lightrl.rewards import RewardSum
from lightrl.sources import as_groups, graded
from lightrl.trainable import Trainable
from lightrl.types import Completion, Prompt, RolloutBatch, RolloutGroup, Sampling

_PULL_SECONDS = 600.0


@dataclass(slots=True)
class _Line:
    """What rank 0 has to talk to servers with."""

    pool: EnginePool
    producer: RolloutProducer | None = None
    sampling: Sampling | None = None

    def close(self) -> None:
        try:
            if self.producer is not None:
                self.producer.stop()
        finally:
            self.pool.close()


class TrainWorker(Trainable):
    """Pulls rollouts of a :class:`~lightrl.RolloutServer`, trains, and pushes new weights while it generates.

    What ``"async_vllm"`` does, by hand: the same wire, queue and safety. On several ranks each gets an equal share of
    every batch, and all call :meth:`sync_weights` together.

    Args:
        model: see :class:`~lightrl.trainable.Trainable`; the server's model.
        queue_address: of the server, or of several servers of the same model and prompts.
        lr: see :class:`~lightrl.trainable.Trainable`.
        reward_fn: scores completions, in any form that :class:`~lightrl.rewards.RewardSum` takes, on a thread of its
            own; None: set each ``rollout.reward`` in the loop.
        prompts_per_step: groups that are pulled at once, over all ranks.
        max_staleness: how many pulls after its weights were pushed a rollout may at most be handed out; 0: each batch
            is sampled from weights that were pushed after the one before was trained on.
        recompute_kv: see :class:`~lightrl.strategies.AsyncVLLMStrategy`.
        max_restarts: how often each server may be lost, and come back, within an hour.
        start_timeout: seconds that a server may take to stand.
        push_timeout: seconds that a server may take to load weights.
        rollout_timeout: seconds that a pull waits.
        kwargs: see :class:`~lightrl.trainable.Trainable`.

    Raises:
        ValueError: see :class:`~lightrl.trainable.Trainable`; or an address is none or needs a token, an argument is
            out of range, or the model has no tokenizer.
    """

    def __init__(
        self,
        model: Any,
        queue_address: str | list[str],
        lr: float = 1e-6,
        *,
        reward_fn: Callable[..., Any] | None = None,
        prompts_per_step: int = 8,
        max_staleness: int = 1,
        recompute_kv: bool = True,
        max_restarts: int = 3,
        start_timeout: float = 600.0,
        push_timeout: float = 300.0,
        rollout_timeout: float = _PULL_SECONDS,
        **kwargs: Any,
    ) -> None:
        launcher = FixedLauncher([queue_address] if isinstance(queue_address, str) else queue_address)
        RolloutQueue(prompts_per_step, max_staleness)
        if prompts_per_step % world_size():
            raise ValueError(f"prompts_per_step={prompts_per_step} does not divide into {world_size()} ranks")
        self._rewards = RewardSum(reward_fn) if reward_fn is not None else None
        super().__init__(model, lr, **kwargs)
        if self.tokenizer_name is None:
            raise ValueError("the model has no tokenizer, which rollouts need to become text: give tokenizer=...")
        self.prompts_per_step, self.max_staleness = prompts_per_step, max_staleness
        self.rollout_timeout = rollout_timeout
        self.steps = 0
        """Optimizer steps done."""
        self.pulled = 0
        """Batches handed out."""
        self._pushed: int | None = None  # pulls done when weights were last pushed
        self._steps_at: dict[int, int] = {}
        self._publisher = Publisher(self, self.dtype, Outbox("wire", self.device, []), recompute_kv, self.shapes)
        self._limits = {"max_restarts": max_restarts, "start_timeout": start_timeout, "push_timeout": push_timeout}
        self._launcher = launcher
        self._line: _Line | None = None
        self._end: Callable[[], Any] = lambda: None
        me = weakref.ref(self)
        self.optimizer.register_step_post_hook(lambda *_: _count_step(me()))

    def pull_rollouts(self) -> Iterator[list[RolloutBatch]]:
        """Yield batches for ever: for each prompt one of one group, with rewards if there is a ``reward_fn``.

        Call :meth:`sync_weights` when a batch is trained on.

        Raises:
            RuntimeError: :meth:`sync_weights` was not called for more than ``max_staleness`` batches.
            TimeoutError: no batch came in time.
            EngineDiedError: a server was lost too often.
        """
        while True:
            yield self._pull()

    def sync_weights(self) -> None:
        """Push the weights as they are now; generation goes on meanwhile.

        Raises:
            WeightSyncError: a server does not hold what was pushed, or the module has other shapes than at first.
            EngineDiedError: a server was lost too often, or has another model.
        """
        self._publisher.push(self._pool, self.pulled, verify=self._pushed is None)
        self._pushed = self.pulled
        self._steps_at.setdefault(self.pulled, self.steps)

    def close(self) -> None:
        """Leave the server, which waits for the next worker; model and optimizer stay, and the next pull comes back.

        Without it this happens when nobody holds the worker any more.
        """
        self._end()
        self._line = self._pushed = None

    def _pull(self) -> list[RolloutBatch]:
        if self._pushed is None:
            self.sync_weights()
        assert self._pushed is not None
        if self.pulled - self._pushed > self.max_staleness:
            raise RuntimeError(
                f"{self.pulled - self._pushed} batches were pulled since weights were pushed, and "
                f"max_staleness={self.max_staleness}: call sync_weights() when a batch is trained on"
            )
        groups, how = from_rank_zero(self._next)
        self.pulled += 1
        return [self._batch(g, i, how) for i, g in enumerate(groups[rank() :: world_size()])]

    def _batch(self, group: RolloutGroup, index: int, how: Sampling) -> RolloutBatch:
        for rollout in group.rollouts:
            rollout.group_id = index
            steps = [self._steps_at[pulls] for pulls in rollout.policy_versions.tolist()]
            rollout.policy_versions = torch.tensor(steps, dtype=torch.int64)
        oldest = min(int(r.policy_versions.min()) for r in group.rollouts)
        return RolloutBatch([group], oldest, how.temperature, max_completion_tokens=how.max_completion_tokens)

    # -- on rank 0 ----------------------------------------------------------------------------------------------------

    def _next(self) -> tuple[list[RolloutGroup], Sampling]:
        self._pool()
        line = self._line
        assert line is not None
        if line.producer is None:
            pages = line.pool.call(line.pool.task(), timeout=self.rollout_timeout, what="the server's prompts")
            work = _work(pages, self._score())
            queue: RolloutQueue[RolloutGroup] = RolloutQueue(
                self.prompts_per_step, self.max_staleness, first_step=self.pulled
            )
            line.producer = RolloutProducer(line.pool, queue, work, self.rollout_timeout)
            line.sampling = work.sampling
            line.producer.start()
        assert line.sampling is not None
        return line.producer.next_batch().groups, line.sampling

    def _pool(self) -> EnginePool:
        if self._line is None:
            from lightrl.engines.vllm import engine_config

            spec = EngineSpec(engine_config(self.policy).to_dict(), str(self.dtype).removeprefix("torch."))
            pool = EnginePool(self._launcher, spec, seed=torch.initial_seed() % 2**31, **self._limits)  # type: ignore[arg-type]
            self._line = _Line(pool)
            self._end = weakref.finalize(self, self._line.close)
            rank_zero_info(f"waiting for the server at {', '.join(self._launcher.addresses)}")
            pool.start()
        return self._line.pool

    def _score(self) -> Callable[[list[Prompt], list[list[Completion]]], list[RolloutGroup]]:
        assert self.tokenizer_name is not None
        tokenizer = load_tokenizer(self.tokenizer_name, trust_remote_code=self.trust_remote_code)
        rewards = self._rewards

        def score(prompts: list[Prompt], completions: list[list[Completion]]) -> list[RolloutGroup]:
            ids = [c.token_ids for group in completions for c in group]
            texts = tokenizer.batch_decode(ids, skip_special_tokens=True) if ids else []
            groups = as_groups(prompts, completions, texts)
            if rewards is None:
                return groups
            owners = [p for p, group in zip(prompts, completions, strict=True) for _ in group]
            return graded(groups, rewards.score(texts, owners, ids))

        return score


def _work(pages: list[Task], score: Callable[[list[Prompt], list[list[Completion]]], list[RolloutGroup]]) -> Work:
    rows, how = [row for page in pages for row in page.rows], pages[0]
    sampling = Sampling(
        how.max_completion_tokens,
        num_completions=how.group_size,
        temperature=how.temperature,
        stop_token_ids=tuple(how.stop_token_ids),
        seed=how.seed,
    )
    return Work(
        prompts=[Prompt(r.token_ids, r.ground_truth, r.columns, i, r.text) for i, r in enumerate(rows)],
        order=PromptOrder(len(rows), how.seed),
        sampling=sampling,
        seed=how.seed,
        deterministic=False,
        score=score,
    )


def _count_step(worker: TrainWorker | None) -> None:
    if worker is not None:
        worker.steps += 1
