"""Everything that depends on a vLLM version (0.26 to 0.33), or undoes what vLLM does to the process it lives in."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from lightrl.optional import not_installed

_DEFAULTS = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer's threads live in the same process
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # an iterator over our tensors cannot reach an engine in another process
    "VLLM_NO_USAGE_STATS": "1",
}

_RELOADING = "vllm.model_executor.model_loader.reload.layerwise"

# What is meant here although it is warned of, by logger: an eager engine without a tokenizer, CPU limits, own seeds,
# prompts that are not cut.
_MEANT = {
    "torch._library.triton": ("Triton not available",),
    "vllm.config.vllm": ("Enforce eager set", "Inductor compilation was disabled", "Model Runner V2 requires Triton"),
    "vllm.engine.arg_utils": ("The global random seed is set", "This model does not officially support disabling"),
    "vllm.model_executor.model_loader.reload.layerwise": ("RotaryEmbedding: Failed", "ParallelLMHead: Failed"),
    "vllm.platforms.cpu": ("Triton is not installed", "Reset SSM cache type"),
    "vllm.renderers.base": ("Chat template warmup failed", "Using None for"),
    "vllm.triton_utils.dispatcher": ("Kernel vllm.",),
    "vllm.v1.worker.cpu_worker": ("CPU backend doesn't allow", "sleep mode is not supported", "lib"),
}


def _leave_out(prefixes: tuple[str, ...]) -> Callable[[logging.LogRecord], bool]:
    return lambda record: not record.getMessage().startswith(prefixes)


def _silence() -> None:
    for name, prefixes in _MEANT.items():
        logger = logging.getLogger(name)
        if not logger.filters:  # on the logger itself: vLLM makes its handlers anew with every engine
            logger.addFilter(_leave_out(prefixes))


def import_vllm() -> Any:
    """Import vLLM for use in this process.

    Raises:
        ValueError: it is not installed.
    """
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    try:
        with ThreadPoolExecutor(1) as thread:
            vllm = thread.submit(_load).result()
    except ImportError as error:
        raise not_installed("vllm", "the vLLM engine", error) from error
    _silence()
    return vllm


def _load() -> Any:
    # vLLM keeps the error of an import that failed, and so all frames below it for good, with the models in them: here
    # on a thread of its own there are none.
    import vllm

    vllm.LLM  # noqa: B018 (imported when it is first asked for)
    return vllm


def sampling_params(**arguments: Any) -> Any:
    """Return vLLM's ``SamplingParams``."""
    from vllm import SamplingParams

    return SamplingParams(**arguments)


@contextmanager
def torchrun_environment(rank: int, local_rank: int, world_size: int) -> Iterator[None]:
    """Set the variables that vLLM's external launcher reads while it is built, and put the old ones back after it."""
    values = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": world_size}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    before = {name: os.environ.get(name) for name in (*values, *address)}
    os.environ.update(address | {n: v for n, v in before.items() if v} | {n: str(v) for n, v in values.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@contextmanager
def process_kept() -> Iterator[None]:
    """Keep or undo what building an engine does to its process: threads, memory binding, frozen garbage, warnings."""
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    ops: Any = torch.ops._C
    ops.init_cpu_memory_env = lambda nodes: None  # it would bind the trainer's memory to one NUMA node too
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning)
            yield
    finally:
        del ops.init_cpu_memory_env
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)
        os.environ.pop("VLLM_DIST_IDENT", None)
        gc.unfreeze()


@contextmanager
def refusals() -> Iterator[None]:
    """Make a ValueError of vLLM's refusal of a request: newer versions have errors of their own for it.

    Raises:
        ValueError: in place of theirs.
    """
    from vllm import exceptions

    try:
        yield
    except getattr(exceptions, "VLLMClientError", ValueError) as error:
        raise ValueError(str(error)) from error


def model_of(llm: Any) -> torch.nn.Module:
    """Return the engine's own module on this rank."""
    found = _model_of(llm.llm_engine)
    assert found is not None, "it is in processes of its own"
    return found


def _model_of(engine: Any) -> torch.nn.Module | None:
    worker = getattr(engine.model_executor, "driver_worker", None)
    worker = getattr(worker, "worker", worker)
    return None if worker is None else worker.get_model()


def forget_model(engine: Any) -> None:
    """Have vLLM and torch let go of the module of an in-process engine that ends.

    Where it was compiled or loaded anew, they keep it until the process ends otherwise, with its weights and its cache.
    """
    model = _model_of(engine)
    modules = set() if model is None else set(model.modules())
    loaded: Any = getattr(sys.modules.get(_RELOADING), "LAYERWISE_INFO", {})
    for module in modules:
        loaded.pop(module, None)
    # Each class of a module that is compiled makes a hook, and vLLM knows the last.
    hooks: dict[int, Any] = getattr(sys.modules.get("torch._dynamo.convert_frame"), "_bytecode_hooks", {})
    for key in [key for key, hook in hooks.items() if getattr(hook, "__self__", None) in modules]:
        del hooks[key]


def scheduler_of(llm: Any) -> Any:
    """Return the scheduler of an engine in this process, None of another."""
    return getattr(getattr(llm.llm_engine.engine_core, "engine_core", None), "scheduler", None)


def sampled_so_far(llm: Any, *, under_way: bool) -> dict[str, int]:
    """Return how many tokens each unfinished request has sampled, by the id that the request was given.

    Args:
        llm: it may be amid requests.
        under_way: count tokens of a step that the device was given and whose outcome nobody has fetched.
    """
    counts = {}
    known = getattr(scheduler_of(llm), "requests", {})
    for rid, name, state in _unfinished(llm):
        if rid in known:  # its tokens may not have been passed on: see late_output.py
            counts[name] = known[rid].num_output_tokens + (known[rid].num_output_placeholders if under_way else 0)
        else:
            counts[name] = int(state.detokenizer.num_output_tokens())
    return counts


def sampled_by(llm: Any) -> dict[str, tuple[list[int], list[float]]]:
    """Return token ids and logprobs that each unfinished request has sampled, by the id that the request was given."""
    pass_on = getattr(getattr(scheduler_of(llm), "update_from_output", None), "pass_on", None)
    if pass_on is not None:  # a LateOutput's
        pass_on()
    found = {}
    for _, name, state in _unfinished(llm):
        ids, logprobs = list(state.detokenizer.output_token_ids), state.logprobs_processor.logprobs
        values = list(logprobs.logprobs) if logprobs is not None else []
        found[name] = (ids[: len(values)], values)
    return found


def _unfinished(llm: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield vLLM's id of each request, the one that the request was given, and the front end's state of it."""
    for rid, state in llm.llm_engine.output_processor.request_states.items():
        yield rid, getattr(state, "external_req_id", None) or rid, state


def repack_tied_head(model: torch.nn.Module) -> None:
    """Have a tied head on the CPU take over the embedding's values: it keeps a packed copy that no reload touches."""
    for module in model.modules():
        if type(module).__name__ == "ParallelLMHead" and next(module.parameters()).device.type == "cpu":
            quant_method: Any = module.quant_method
            quant_method.process_weights_after_loading(module)


def add_request(engine: Any, name: str, prompt_ids: list[int], params: Any, cache_salt: str | None = None) -> None:
    """Hand a request to a running ``LLMEngine``, in the form that its version wants a prompt of token ids in.

    One output comes back, when it has ended. Requests share cached attention states only with those of the same
    ``cache_salt``.
    """
    from vllm.sampling_params import RequestOutputKind

    params.output_kind = RequestOutputKind.FINAL_ONLY
    prompt: Any = {"prompt_token_ids": prompt_ids}
    if cache_salt is not None:
        prompt["cache_salt"] = cache_salt
    renderer: Any = getattr(engine, "renderer", None)
    if hasattr(renderer, "render_cmpl"):
        (prompt,) = renderer.render_cmpl([prompt])
    engine.add_request(name, prompt, params)
    if params.logprobs == 0 and params.flat_logprobs:
        for state in itertools.islice(reversed(engine.output_processor.request_states.values()), params.n):
            _keep_logprobs_alone(state.logprobs_processor)


def _keep_logprobs_alone(processor: Any) -> None:
    """Have the sampled tokens' logprobs be all that is kept: ids and ranks take a tenth of the host's time."""
    kept: list[float] = processor.logprobs.logprobs
    if hasattr(processor, "_update_sample_logprobs"):
        processor._update_sample_logprobs = lambda found: kept.extend(found.logprobs[:, 0].tolist())


def run_requests(llm: Any, prompts: list[list[int]], params: list[Any]) -> list[Any]:
    """Return vLLM's output for each prompt of token ids, sampled all at once.

    Raises:
        ValueError: one is refused; none of the others is left in the engine.
    """
    engine = llm.llm_engine
    names = [str(i) for i in range(len(prompts))]
    found: dict[str, Any] = {}
    try:
        with refusals():
            for name, ids, how in zip(names, prompts, params, strict=True):
                add_request(engine, name, ids, how)
        while engine.has_unfinished_requests():
            found |= {output.request_id: output for output in engine.step() if output.finished}
    except BaseException:
        engine.abort_request(names)
        raise
    return [found[name] for name in names]
