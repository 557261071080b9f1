"""vLLM that never waits for a batch: requests join and leave while it steps, and weights change in between."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightrl.engines import compat, ending
from lightrl.engines.base import WeightSyncError
from lightrl.engines.janitor import Janitor, shared_files
from lightrl.engines.loader import Loader
from lightrl.engines.messages import EngineSpec, Output, Push, Request, encode, float_bytes
from lightrl.engines.shortcuts import shorten_decoding
from lightrl.engines.staging import SharedReader
from lightrl.engines.vllm import OUTPUT, SCORE, llm_args, loader_of, prompt_logprobs, sampled
from lightrl.weights.source import Weights

_SCORE_ID = "score"


class ContinuousEngine:
    """An ``LLM`` stepped by hand, in a process that has nothing else to do.

    Stepping in this process, and not in one of vLLM's own, puts each change of weights between two steps: nothing has
    to be paused, and the version of every token is known.

    Args:
        spec: what to build.

    Raises:
        ValueError: vLLM is not installed, or refuses the spec.
    """

    def __init__(self, spec: EngineSpec) -> None:
        vllm = compat.import_vllm()
        self.spec = spec
        self.version = -1
        """Optimizer steps done by the weights that it holds; -1 before the first push."""
        self._loads = 0
        self._changes: dict[str, list[tuple[int, int]]] = {}  # id: (version, tokens sampled when it was replaced)
        self._done: list[Output] = []
        self._scores: dict[str, Any] = {}
        self._config = tempfile.TemporaryDirectory(prefix="lightrl-engine-")
        (Path(self._config.name) / "config.json").write_text(json.dumps(spec.config))
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        args = llm_args(spec.dtype, self.device, spec.engine_args) | {
            "model": spec.code_path or self._config.name,
            "tensor_parallel_size": spec.tensor_parallel_size,
            "distributed_executor_backend": "uni" if spec.tensor_parallel_size == 1 else "mp",
            "max_model_len": spec.max_model_len,
            "trust_remote_code": spec.code_path is not None,
            "worker_extension_cls": "lightrl.engines.worker.WeightLoader",
            **spec.engine_args,
        }
        with ending.groups_held() as held:
            self.llm: Any = vllm.LLM(**args)
        self._end = ending.end_with(self.llm, held)
        shorten_decoding(self.llm)
        self._janitor = Janitor() if spec.tensor_parallel_size > 1 else None
        if self._janitor is not None:
            self._janitor.add(shared_files())
        self._reader = SharedReader()
        self._loader: Loader | None = loader_of(self.llm, 0) if spec.tensor_parallel_size == 1 else None

    @property
    def busy(self) -> bool:
        """Whether there is anything to step for or to hand out."""
        return bool(self._done) or self.llm.llm_engine.has_unfinished_requests()

    def submit(self, request: Request) -> None:
        """Let a request join.

        Raises:
            ValueError: vLLM refuses it, for example because it is too long.
        """
        with compat.refusals():
            params = compat.sampling_params(
                max_tokens=request.max_tokens,
                temperature=request.temperature,
                top_p=request.top_p,
                top_k=request.top_k,
                min_p=request.min_p,
                stop_token_ids=request.stop_token_ids,
                seed=request.seed,
                **OUTPUT,
            )
            self._add(request.id, request.prompt, params)
        self._changes[request.id] = []

    def _add(self, request_id: str, ids: list[int], params: Any) -> None:
        # vLLM looks at token ids only where it has a tokenizer; the model would fail on them, and the engine with it.
        vocab_size = self.llm.llm_engine.model_config.get_vocab_size()
        if wrong := [i for i in ids if not 0 <= i < vocab_size]:
            raise ValueError(f"token id {wrong[0]} is outside the vocabulary of {vocab_size}")
        # The salt keeps a new request from attention states that older weights computed.
        compat.add_request(self.llm.llm_engine, request_id, ids, params, cache_salt=str(self._loads))

    def abort(self, ids: list[str]) -> None:
        """Let requests go without an output; unknown ones are ignored."""
        self.llm.llm_engine.abort_request([i for i in ids if self._changes.pop(i, None) is not None])
        gone = set(ids)
        self._done = [o for o in self._done if o.id not in gone]

    def abort_all(self) -> None:
        """Let every request go."""
        self.abort([*self._changes, *(o.id for o in self._done)])

    def step(self) -> list[Output]:
        """Sample the next token of every running request; return those that ended."""
        if self.llm.llm_engine.has_unfinished_requests():
            with torch.no_grad():
                for output in self.llm.llm_engine.step():
                    self._finish(output)
        done, self._done = self._done, []
        return done

    def _finish(self, output: Any) -> None:
        if not output.finished:
            return
        if output.request_id.startswith(_SCORE_ID):
            self._scores[output.request_id] = output
            return
        if output.request_id not in self._changes:
            return  # aborted
        self._done.append(self._output(output.request_id, *sampled(output.outputs[0])))
        del self._changes[output.request_id]

    def _output(self, request_id: str, ids: list[int], logprobs: list[float], truncated: bool) -> Output:
        versions, before = [], 0
        for version, up_to in [*self._changes[request_id], (self.version, len(ids))]:
            count = min(up_to, len(ids))  # what was under way at a change may not have come yet
            if count > before:
                versions.append((version, count - before))
                before = count
        return Output(request_id, ids, float_bytes(logprobs), versions, truncated)

    def running(self) -> list[Output]:
        """Return what requests that have not ended have sampled so far."""
        so_far = compat.sampled_by(self.llm)
        return [self._output(i, *so_far[i], False) for i in self._changes if i in so_far and so_far[i][0]]

    def load(self, weights: Weights, version: int, recompute_kv: bool) -> float:
        """Put weights in, check them, and go on under the new version.

        Args:
            weights: all of them.
            version: optimizer steps done by them.
            recompute_kv: compute attention states of running requests again under the new weights; otherwise later
                tokens look at states of older ones.

        Returns:
            Seconds that generation stood still.

        Raises:
            WeightSyncError: a tensor did not arrive as it was sent.
        """
        load = self._load_on_workers if self._loader is None else self._loader.load
        return self._change(lambda: load(weights), version, recompute_kv)

    def load_shared(self, push: Push) -> float:
        """As :meth:`load`, of weights that lie in memory which ``push`` names.

        Raises:
            ValueError: it cannot be opened.
        """
        assert push.shared is not None
        if self._loader is not None:
            return self.load(self._reader.weights(push), push.version, push.recompute_kv)
        message = encode(push)
        return self._change(lambda: self._on_workers("lightrl_load_shared", message), push.version, push.recompute_kv)

    def _change(self, load: Callable[[], None], version: int, recompute_kv: bool) -> float:
        started = time.perf_counter()
        # What is under way samples from the old weights, and is thrown away where states are computed again.
        so_far = compat.sampled_so_far(self.llm, under_way=not recompute_kv)
        load()
        for request_id, changes in self._changes.items():
            if so_far.get(request_id):
                changes.append((self.version, so_far[request_id]))
        self.version = version
        self._loads += 1
        if recompute_kv:
            self.llm.llm_engine.reset_prefix_cache(reset_running_requests=True)
        return time.perf_counter() - started

    def _load_on_workers(self, weights: Weights) -> None:
        from safetensors.torch import save_file

        # A file in memory: no iterator can cross to vLLM's workers, and all of them read the same one.
        shared = "/dev/shm" if Path("/dev/shm").is_dir() else None
        with tempfile.NamedTemporaryFile(prefix="lightrl-weights-", dir=shared) as file:
            if self._janitor is not None:
                self._janitor.add([file.name])
            save_file({name: tensor.contiguous() for name, tensor in weights}, file.name)
            self._on_workers("lightrl_load", file.name)

    def _on_workers(self, method: str, argument: str | bytes) -> None:
        if wrong := [error for error in self.llm.collective_rpc(method, args=(argument,)) if error]:
            raise WeightSyncError(f"on a worker of this engine, {wrong[0]}")

    def score(self, sequences: list[list[int]]) -> list[Tensor]:
        """Return, for each sequence of L tokens, float32 [L - 1]: logprobs of tokens 2..L at temperature 1.

        Raises:
            ValueError: vLLM refuses one of them.
        """
        ids = [f"{_SCORE_ID}-{i}" for i in range(len(sequences))]
        try:
            with compat.refusals():
                for request_id, sequence in zip(ids, sequences, strict=True):
                    self._add(request_id, sequence, compat.sampling_params(**SCORE))
        except ValueError:
            self.llm.llm_engine.abort_request(ids)  # those before it
            raise
        while not all(i in self._scores for i in ids):
            self._done = self.step()
        return [prompt_logprobs(self._scores.pop(i), s) for i, s in zip(ids, sequences, strict=True)]

    def close(self) -> None:
        """Release everything; may be called twice."""
        if self.llm is not None:
            self._end()
            self.llm = self._loader = None
            self._config.cleanup()
