"""One set of weights, by turns a real ``vllm.LLM`` and a real module with its optimizer, in a loop of one's own."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from lightrl.distributed import all_objects, rank
from lightrl.rng import OwnRandomState, derive_seed
from lightrl.swap import Swap
from lightrl.trainable import Trainable, Turn
from lightrl.weights.source import weights_mark

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class WeightManager(Trainable):
    """Trains a model and generates with it, in turns on the same devices: what ``"colocated_vllm"`` does, by hand.

    All ranks of the process group change turns together. Sampling has random state of its own, and leaves torch's,
    NumPy's and Python's as they were.

    Args:
        model: see :class:`~lightrl.trainable.Trainable`.
        lr: see there.
        sleep: give the engine's memory to the trainer at its turn.
        offload_optimizer: give the optimizer's memory to the engine at its turn; None: where both do not fit.
        kwargs: see :class:`~lightrl.trainable.Trainable`.

    Raises:
        ValueError: see :class:`~lightrl.trainable.Trainable`.

    Example::

        manager = WeightManager("Qwen/Qwen3-0.6B", lr=1e-6)
        outputs = manager.as_vllm().generate(prompts, SamplingParams(n=8, logprobs=1))
        model, optimizer = manager.as_trainable()
    """

    def __init__(
        self, model: Any, lr: float = 1e-6, *, sleep: bool = True, offload_optimizer: bool | None = None, **kwargs: Any
    ) -> None:
        super().__init__(model, lr, **kwargs)
        self.sleep, self.offload_optimizer = sleep, offload_optimizer
        self._swap: Swap | None = None
        self._engine_args: dict[str, Any] = {}
        self._pushed: list[tuple[int, int]] | None = None  # None: the engine has nothing of ours
        self._collected: Any = None
        self.pushes = 0
        """How often weights were pushed into the engine."""

    def as_vllm(self, **engine_args: Any) -> Any:
        """Return the ``vllm.LLM``, holding the weights as they are now; it is built at the first call.

        Args:
            engine_args: of ``vllm.LLM``, at the first call; later ones may repeat them.

        Raises:
            ValueError: vLLM is not installed or cannot serve such a model, or the arguments are others than at first.
            WeightSyncError: the engine does not hold what was pushed, or the module has other shapes than at first.
        """
        if self._swap is None:
            self._swap = self._build(engine_args)
            self._engine_args = engine_args
        elif engine_args and engine_args != self._engine_args:
            raise ValueError(
                f"as_vllm({engine_args}): the engine was built with {self._engine_args}. Leave the arguments out, or "
                "call close() to have the next as_vllm() build another"
            )
        self.switch_to_generate()
        return self._swap.engine.llm  # type: ignore[attr-defined]

    def as_trainable(self) -> tuple[PreTrainedModel, torch.optim.Optimizer]:
        """Return the module, sharded where a process group was up, and its optimizer: the same two at every call."""
        self.switch_to_train()
        return self.policy, self.optimizer

    def switch_to_generate(self) -> None:
        """Begin the engine's turn: push the weights if they changed, and let it generate. It may be its turn already.

        Raises:
            RuntimeError: there is no engine yet.
            WeightSyncError: see :meth:`as_vllm`.
        """
        if self._swap is None:
            raise RuntimeError("there is no engine yet: as_vllm() builds it")
        mark = weights_mark(self.policy)
        stale = any(all_objects(mark != self._pushed))
        if self._turn.now == "engine" and not stale:
            return
        self.switch_to_train()
        self._turn.now = "change"
        try:
            with torch.no_grad():
                seconds = self._swap.to_engine(stale)
        except BaseException:
            self._turn.now, self._pushed = "trainer", None
            raise
        self._turn.now, self._pushed = "engine", mark
        self.pushes += seconds > 0

    def switch_to_train(self) -> None:
        """Begin the trainer's turn. It may be its turn already."""
        if self._turn.now == "engine":
            assert self._swap is not None
            self._swap.to_trainer()
            self._turn.now = "trainer"

    @contextmanager
    def generation_mode(self, **engine_args: Any) -> Iterator[Any]:
        """Have the ``vllm.LLM`` inside the block, and whose turn it was before again after it."""
        with self._turn_kept():
            yield self.as_vllm(**engine_args)

    @contextmanager
    def training_mode(self) -> Iterator[tuple[PreTrainedModel, torch.optim.Optimizer]]:
        """Have module and optimizer inside the block, and whose turn it was before again after it."""
        with self._turn_kept():
            yield self.as_trainable()

    @contextmanager
    def _turn_kept(self) -> Iterator[None]:
        before = self._turn.now
        try:
            yield
        finally:
            self.switch_to_generate() if before == "engine" else self.switch_to_train()

    def close(self) -> None:
        """End the engine; model and optimizer stay, and :meth:`as_vllm` would build another. May be called twice.

        Without it the engine ends when nobody holds manager and ``LLM`` any more.
        """
        swap, self._swap, self._pushed = self._swap, None, None
        if swap is None:
            return
        self._collected.detach()
        try:
            swap.engine.close()
        finally:
            swap.take_back()
            self._turn.now = "trainer"

    def _build(self, engine_args: dict[str, Any]) -> Swap:
        from lightrl.engines.vllm import VLLMEngine

        args = dict(engine_args)
        if self.tokenizer_name is not None:
            name = self.tokenizer_name
            args = {"skip_tokenizer_init": False, "tokenizer": name, "generation_config": name} | args
        try:
            engine = VLLMEngine(
                self.policy,
                local_rank=self.device.index or 0,
                device=self.device,
                dtype=self.dtype,
                tensor_parallel_size=args.pop("tensor_parallel_size", 1),
                max_model_len=args.pop("max_model_len", None),
                trust_remote_code=self.trust_remote_code,
                engine_args=args,
            )
        except (ValueError, TypeError, NotImplementedError) as error:
            raise ValueError(f"vLLM cannot serve this {type(self.policy).__name__}: {error}") from error
        own = OwnRandomState(derive_seed(torch.initial_seed(), "engine", rank() // engine.tensor_parallel_size))
        _guard(engine.llm.llm_engine, self._turn, own)
        self._collected = weakref.finalize(engine.llm, setattr, self._turn, "now", "trainer")
        return Swap(
            engine,
            self,
            self.dtype,
            optimizers=lambda: [self.optimizer],
            sleep=self.sleep,
            offload=self.offload_optimizer,
            shapes=self.shapes,
        )


def _guard(engine: Any, turn: Turn, own: OwnRandomState) -> None:
    """Have an ``LLMEngine`` refuse requests that would wait for its turn for ever, and sample with its own state."""
    add_request, step = engine.add_request, engine.step

    def guarded_add(*args: Any, **kwargs: Any) -> Any:
        turn.require("engine", "change", what="the engine was asked to generate", fix="call as_vllm() first")
        return add_request(*args, **kwargs)

    def isolated_step() -> Any:
        with torch.no_grad(), own.active():
            return step()

    engine.add_request, engine.step = guarded_add, isolated_step
