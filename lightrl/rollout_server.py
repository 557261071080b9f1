"""Rollouts from a process or a machine of their own: the half that generates."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from lightrl.arguments import check_at_least_one
from lightrl.engines import compat, messages, secure
from lightrl.engines.messages import Ask, EngineSpec, FromTrainer, PromptRow, Push, Task
from lightrl.engines.server import EngineServer, RefusedError
from lightrl.policy import context_length, load_config, load_tokenizer
from lightrl.prompts import load_rows, stop_token_ids, tokenize_prompts
from lightrl.rng import forked_rng
from lightrl.types import Prompt, Sampling
from lightrl.weights.canary import LONGEST
from lightrl.weights.source import Shapes, plain_shapes

_PAGE_BYTES = 2**23
_COMPLETION_TOKENS = 1024


class RolloutServer:
    """Holds prompts and an engine, and generates without pause for a :class:`~lightrl.TrainWorker`.

    The worker brings the weights, while generation runs. One worker is served at a time, the last to come; when it
    goes, the server waits for the next. What both must know to talk to each other is as with
    ``python -m lightrl.engines.server``: on a loopback address nothing, elsewhere the token in ``LIGHTRL_TOKEN``.

    Args:
        model: folder or hub name of the model that the worker trains; of it only configuration and tokenizer are read.
        queue_address: where to listen, such as ``"tcp://127.0.0.1:5555"``.
        group_size: completions of each prompt.
        max_completion_tokens: longest completion, its stop token included; None: 1024, or half of the model's context
            where that is less.
        temperature: of sampling.
        max_model_len: longest prompt + completion in tokens; None: what the prompts need.
        tensor_parallel_size: GPUs of the engine.
        seed: of sampling and of the order of prompts.
        tokenizer: folder or hub name; None: the model's own.
        trust_remote_code: run code that comes with the model.
        engine_args: further arguments of ``vllm.LLM``.

    Raises:
        ValueError: there is no such model, ``queue_address`` is none or needs a token, or an argument is out of range.
    """

    def __init__(
        self,
        model: str | Path,
        queue_address: str,
        *,
        group_size: int = 8,
        max_completion_tokens: int | None = None,
        temperature: float = 1.0,
        max_model_len: int | None = None,
        tensor_parallel_size: int = 1,
        seed: int = 0,
        tokenizer: str | Path | None = None,
        trust_remote_code: bool = False,
        **engine_args: Any,
    ) -> None:
        self.queue_address = secure.check_address(queue_address, bind=True)
        self._token = secure.own_token(queue_address)
        self.model = str(model)
        self._config = load_config(model, trust_remote_code=trust_remote_code)
        self._context = context_length(self._config)
        longest = _COMPLETION_TOKENS if self._context is None else min(_COMPLETION_TOKENS, self._context // 2)
        longest = longest if max_completion_tokens is None else max_completion_tokens
        check_at_least_one(group_size=group_size, max_completion_tokens=longest)
        self.sampling = Sampling(longest, num_completions=group_size, temperature=temperature, seed=seed).for_training()
        self.tokenizer = load_tokenizer(tokenizer or model, trust_remote_code=trust_remote_code)
        self._trust_remote_code, self._engine_args = trust_remote_code, engine_args
        self._max_model_len, self._tensor_parallel_size = max_model_len, tensor_parallel_size

    def run(self, prompts: Any) -> None:
        """Serve, until the process is interrupted.

        Args:
            prompts: what :class:`~lightrl.RolloutDataModule` takes: the path of a parquet or JSON-lines file, a list of
                strings or of rows, ..

        Raises:
            ValueError: vLLM is not installed or does not know an engine argument; see
                :func:`~lightrl.prompts.load_rows` and :func:`~lightrl.prompts.tokenize_prompts`; or a row
                holds what cannot be sent.
        """
        _check_engine_args(self._engine_args)
        left = None if self._context is None else self._context - self.sampling.max_completion_tokens
        if left is not None and left < 1:
            raise ValueError(
                f"max_completion_tokens={self.sampling.max_completion_tokens} leaves no room for a prompt in the "
                f"model's context of {self._context} tokens"
            )
        tokenized = tokenize_prompts(load_rows(prompts), self.tokenizer, max_prompt_tokens=left)
        longest = max(len(p.token_ids) for p in tokenized) + self.sampling.max_completion_tokens
        needed = max(longest, LONGEST + 1)  # what the weights are checked with has to fit too
        server = _PromptServer(
            self.queue_address, self._token, self._pages(tokenized), self._spec(needed), self._shapes()
        )
        with suppress(KeyboardInterrupt):  # which is how it is ended
            print(f"rollout server listens on {server.address}", flush=True)
            server.serve()

    def _pages(self, prompts: list[Prompt]) -> list[bytes]:
        """Return the encoded answers to :class:`Ask`."""
        pages: list[list[PromptRow]] = [[]]
        size = 0
        for prompt in prompts:
            row = PromptRow(prompt.token_ids, prompt.text, prompt.ground_truth, prompt.columns)
            try:
                own = len(messages.encode(row))
            except (TypeError, OverflowError) as error:
                raise ValueError(f"prompt row {prompt.index} cannot be sent: {error}. Leave that column out") from error
            if size + own > _PAGE_BYTES and pages[-1]:
                pages.append([])
                size = 0
            pages[-1].append(row)
            size += own
        how = self.sampling
        stops = list(stop_token_ids(self.tokenizer, _generation_config(self.model), self._config))
        numbers = (how.num_completions, how.max_completion_tokens, how.temperature)
        return [messages.encode(Task(rows, len(pages), *numbers, stops, how.seed)) for rows in pages]

    def _spec(self, needed: int) -> EngineSpec:
        return EngineSpec(
            config=self._config.to_dict(),
            dtype="",  # the worker's to say
            max_model_len=self._max_model_len or needed,
            tensor_parallel_size=self._tensor_parallel_size,
            engine_args=self._engine_args,
            code_path=self.model if self._trust_remote_code else None,
        )

    def _shapes(self) -> Shapes:
        from transformers import AutoModelForCausalLM

        with forked_rng(0), torch.device("meta"):
            return plain_shapes(
                AutoModelForCausalLM.from_config(self._config, trust_remote_code=self._trust_remote_code)
            )


class _PromptServer(EngineServer):
    """An engine server whose engine is its own to choose, and which has prompts.

    Args:
        address: see :class:`EngineServer`.
        token: see there.
        pages: encoded answers to :class:`Ask`.
        spec: of the engine, but for its dtype.
        shapes: of what a push must bring.
    """

    def __init__(self, address: str, token: str, pages: list[bytes], spec: EngineSpec, shapes: Shapes) -> None:
        super().__init__(address, token)
        self._pages, self._spec, self._shapes = pages, spec, shapes

    def _accept(self, spec: EngineSpec) -> EngineSpec:
        own = self._spec
        return EngineSpec(
            own.config, spec.dtype, own.max_model_len, own.tensor_parallel_size, own.engine_args, own.code_path
        )

    def _handle(self, message: FromTrainer, frames: list[Any]) -> None:
        if isinstance(message, Ask):
            if not 0 <= message.page < len(self._pages):
                raise RefusedError(f"to give page {message.page} of {len(self._pages)}")
            self._send_frame(self._pages[message.page])
            return
        if isinstance(message, Push):
            self._check_shapes({meta.name: torch.Size(meta.shape) for meta in message.tensors})
        super()._handle(message, frames)

    def _check_shapes(self, sent: dict[str, torch.Size]) -> None:
        for name in sorted({*sent, *self._shapes}):
            if sent.get(name) != self._shapes.get(name):
                has, wanted = (list(shapes[name]) if name in shapes else "missing" for shapes in (sent, self._shapes))
                raise RefusedError(
                    f"a push of another model than the server's: {name} is {has} there and {wanted} here. Give both "
                    "the same model"
                )


def _check_engine_args(engine_args: dict[str, Any]) -> None:
    known = {f.name for f in fields(compat.import_vllm().EngineArgs)}
    if unknown := sorted(set(engine_args) - known):
        raise ValueError(f"vllm.LLM knows no argument {', '.join(map(repr, unknown))}")


def _generation_config(model: str) -> Any:
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(model)
    except OSError:  # it has none
        return None
