"""vLLM in the trainer's process: one engine for each tensor-parallel group of ranks."""

from __future__ import annotations

import copy
import gc
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightrl.distributed import all_objects, make_lone_group, rank, world_size
from lightrl.engines import compat, ending
from lightrl.engines.base import WeightSyncError
from lightrl.engines.loader import Loader
from lightrl.engines.shortcuts import shorten_decoding
from lightrl.engines.vllm_session import VLLMSession
from lightrl.lora import check_engine_merges
from lightrl.policy import plain_class
from lightrl.rng import derive_seed, forked_rng
from lightrl.types import Completion, Sampling

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from lightrl.weights.source import Weights

_CPU_CACHE_BYTES = 2**28
_GRAPHED = 512
"""Requests in the largest CUDA graph that vLLM makes unless told."""
OUTPUT = {"logprobs": 0, "flat_logprobs": True, "detokenize": False}
"""Sampling parameters for what comes back: token ids and the sampled token's logprob, no text."""
SCORE = {"max_tokens": 1, "prompt_logprobs": 0, "temperature": 0.0, "detokenize": False}
"""Sampling parameters of a request whose prompt is to be scored."""


class VLLMEngine:
    """An ``LLM`` on this rank's device, sharing it with the trainer.

    It is built from the policy's configuration alone, with placeholder weights: the first push brings the real ones.

    Args:
        policy: the trained model, for its configuration.
        local_rank: index of this rank's device on its host.
        device: that device.
        dtype: of the engine's weights.
        tensor_parallel_size: ranks that share one engine; a divisor of the number of ranks.
        max_model_len: longest prompt + completion in tokens.
        trust_remote_code: run code that comes with the model.
        engine_args: further arguments of ``vllm.LLM``, which win over the ones chosen here.

    Raises:
        ValueError: vLLM is not installed, the ranks do not divide into groups of ``tensor_parallel_size``, or
            ``engine_args`` ask for what cannot take the merged weights of a policy with LoRA.
    """

    def __init__(
        self,
        policy: PreTrainedModel,
        *,
        local_rank: int,
        device: torch.device,
        dtype: torch.dtype,
        tensor_parallel_size: int = 1,
        max_model_len: int | None = None,
        trust_remote_code: bool = False,
        engine_args: dict[str, Any] | None = None,
    ) -> None:
        if world_size() % tensor_parallel_size:
            raise ValueError(
                f"{world_size()} ranks do not divide into groups of tensor_parallel_size={tensor_parallel_size}"
            )
        check_engine_merges(policy, engine_args or {})
        vllm = compat.import_vllm()
        self.device, self.dtype = device, dtype
        self.tensor_parallel_size = tensor_parallel_size
        self._tp_index, self._tp_rank = divmod(rank(), tensor_parallel_size)
        self._tp_group = _own_group(tensor_parallel_size)
        self._config = tempfile.TemporaryDirectory(prefix="lightrl-")
        args = llm_args(str(dtype).removeprefix("torch."), device.type, engine_args or {}) | {
            "model": _config_folder(policy, Path(self._config.name), trust_remote_code),
            "distributed_executor_backend": "external_launcher",
            "tensor_parallel_size": tensor_parallel_size,
            "max_model_len": max_model_len,
            "trust_remote_code": trust_remote_code,
            "seed": self._tp_index,
            "enable_sleep_mode": device.type == "cuda",
            **(engine_args or {}),
        }
        gc.collect()  # an engine that nobody holds any more ends now, and not while the next takes its memory
        ending.drop_pools()
        with ending.groups_held() as held:
            make_lone_group(device.type)
            with forked_rng(0), compat.process_kept(), compat.torchrun_environment(rank(), local_rank, world_size()):
                self.llm: Any = vllm.LLM(**args)
        self._end = ending.end_with(self.llm, held)
        shorten_decoding(self.llm)
        self._asleep = False
        self._loader: Any = loader_of(self.llm, self._tp_rank)

    def generate(self, prompts: list[list[int]], sampling: Sampling, policy_version: int) -> list[list[Completion]]:
        """See :class:`~lightrl.engines.base.Engine`."""
        shared = (
            all_objects((prompts, sampling.prompt_seeds), self._tp_group) if self.tensor_parallel_size > 1 else None
        )
        everyone = [p for theirs, _ in shared for p in theirs] if shared else prompts
        seeds = [s for _, theirs in shared for s in theirs] if shared else list(sampling.prompt_seeds)
        outputs = self._sample(everyone, seeds, sampling) if everyone else []
        start = sum(len(theirs) for theirs, _ in shared[: self._tp_rank]) if shared else 0
        own = outputs[start : start + len(prompts)]
        return [[_completion(sample, policy_version) for sample in samples] for samples in own]

    def _sample(self, prompts: list[list[int]], seeds: list[int], sampling: Sampling) -> list[list[Any]]:
        n, options = sampling.num_completions, _options(sampling)
        if not seeds:
            params = compat.sampling_params(n=n, **options)
            outputs = self._run(prompts, [params] * len(prompts), derive_seed(sampling.seed, self._tp_index))
            return [list(o.outputs) for o in outputs]
        # A request with n > 1 would give its samples seed + i, which collides between prompts.
        each = [compat.sampling_params(n=1, seed=derive_seed(s, i), **options) for s in seeds for i in range(n)]
        outputs = self._run([p for p in prompts for _ in range(n)], each, sampling.seed)
        flat = [o.outputs[0] for o in outputs]
        return [flat[i : i + n] for i in range(0, len(flat), n)]

    def _run(self, prompts: list[list[int]], params: list[Any], seed: int) -> list[Any]:
        with torch.no_grad(), forked_rng(seed):
            return compat.run_requests(self.llm, prompts, params)

    @contextmanager
    def session(self, sampling: Sampling, policy_version: int) -> Iterator[VLLMSession]:
        """See :class:`~lightrl.engines.base.Engine`."""
        to_completion = partial(_completion, policy_version=policy_version)
        session = VLLMSession(self.llm, _options(sampling), to_completion, self._tp_group)
        with torch.no_grad(), forked_rng(derive_seed(sampling.seed, self._tp_index)):
            try:
                yield session
            finally:
                session.close()

    def score(self, sequences: list[list[int]]) -> list[Tensor]:
        """See :class:`~lightrl.engines.base.Engine`."""
        params = [compat.sampling_params(**SCORE)] * len(sequences)
        return [prompt_logprobs(o, ids) for ids, o in zip(sequences, self._run(sequences, params, 0), strict=True)]

    def load_weights(self, weights: Weights) -> None:
        """See :class:`~lightrl.engines.base.Engine`.

        Raises:
            WeightSyncError: a tensor did not arrive as it was sent (it is named), or a cache of older weights stays.
        """
        self._loader.load(weights)
        if not self._asleep and not self.llm.reset_prefix_cache():  # asleep, it has no cache
            raise WeightSyncError("vLLM kept its prefix cache after new weights: requests still hold blocks of it")

    def sleep(self) -> bool:
        """See :class:`~lightrl.engines.base.Engine`: weights and cache are dropped, where the device can."""
        self.llm.sleep(level=2)
        self._asleep = self.device.type == "cuda"
        return self._asleep

    def wake_weights(self) -> None:
        """See :class:`~lightrl.engines.base.Engine`."""
        self.llm.wake_up(tags=["weights"])

    def wake_cache(self) -> None:
        """See :class:`~lightrl.engines.base.Engine`."""
        self.llm.wake_up(tags=["kv_cache"])
        self._asleep = False

    def close(self) -> None:
        """See :class:`~lightrl.engines.base.Engine`."""
        if self.llm is not None:
            self._end()
            self.llm = self._loader = None
            self._config.cleanup()
            ending.drop_pools()


def loader_of(llm: Any, tp_rank: int) -> Loader:
    """Return what loads weights into an in-process engine."""
    return Loader(
        compat.model_of(llm),
        tp_rank,
        lambda pairs: llm.collective_rpc("reload_weights", kwargs={"weights_iterator": pairs}),
    )


def prompt_logprobs(output: Any, ids: list[int]) -> Tensor:
    """Return float32 [L - 1]: logprobs of tokens 2..L of a prompt that was scored."""
    rows = output.prompt_logprobs[1:]
    return torch.tensor([row[token].logprob for row, token in zip(rows, ids[1:], strict=True)])


def _own_group(size: int) -> dist.ProcessGroup | None:
    if size == 1:
        return None
    ranks = [list(range(i, i + size)) for i in range(0, world_size(), size)]
    groups: list[dist.ProcessGroup] = [dist.new_group(r, backend="gloo") for r in ranks]  # on every rank, all of them
    return groups[rank() // size]


def _config_folder(policy: PreTrainedModel, folder: Path, trust_remote_code: bool) -> str:
    if trust_remote_code:
        return str(policy.config.name_or_path)  # the folder with the model's own code
    engine_config(policy).save_pretrained(folder)
    return str(folder)


def engine_config(policy: PreTrainedModel) -> PretrainedConfig:
    """Return a copy of the policy's configuration as vLLM has to see it."""
    config = copy.deepcopy(policy.config)
    config.architectures = [plain_class(policy).__name__]
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # a 4-bit base reaches the engine merged, as plain weights
    return config


def llm_args(dtype: str, device_type: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Return what every engine here has in common: token ids in and out, weights to come, logprobs as sampled.

    Args:
        dtype: of the weights.
        device_type: where it runs.
        asked: what the user gives to it.
    """
    # A part of a prompt samples a token that is thrown away, and a CPU's generator cannot go back before it.
    cpu = {"enforce_eager": True, "kv_cache_memory_bytes": _CPU_CACHE_BYTES, "enable_chunked_prefill": False}
    return {
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": dtype,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "disable_log_stats": True,
        **(cpu if device_type == "cpu" else _graphs(asked)),
    }


def _graphs(asked: dict[str, Any]) -> dict[str, int]:
    """Have steps of all requests that may run at once replay a CUDA graph: vLLM's own end at 512 requests."""
    requests = asked.get("max_num_seqs") or 0
    chosen = {"compilation_config", "cudagraph_capture_sizes"} & asked.keys()
    return {"max_cudagraph_capture_size": requests} if requests > _GRAPHED and not chosen else {}


def _options(sampling: Sampling) -> dict[str, Any]:
    return OUTPUT | {
        "max_tokens": sampling.max_completion_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "stop_token_ids": list(sampling.stop_token_ids),
    }


def _completion(sample: Any, policy_version: int) -> Completion:
    ids, logprobs, truncated = sampled(sample)
    versions = torch.full((len(ids),), policy_version, dtype=torch.int64)
    return Completion(ids, torch.tensor(logprobs, dtype=torch.float32), versions, truncated)


def sampled(sample: Any) -> tuple[list[int], list[float], bool]:
    """Return token ids, their logprobs and whether the token budget ended it, of a sample that vLLM returned.

    Raises:
        RuntimeError: something else than a stop token or the budget ended it.
    """
    if sample.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM ended a completion with finish_reason={sample.finish_reason!r}")
    return list(sample.token_ids), list(sample.logprobs.logprobs), sample.finish_reason == "length"
