"""What runs on a GPU only: the head's kernels, the variable-length kernel, pushes into an engine that sleeps."""

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec import structs

from lightrl import attention
from lightrl.engines.messages import EngineSpec, Request
from lightrl.engines.shared import Mirror, SharedBuffer
from lightrl.engines.vllm import engine_config
from lightrl.logprobs import chunked_token_logprobs, get_logprobs
from lightrl.packing import pack
from lightrl.partial import completion
from lightrl.policy import PolicyForward
from lightrl.weights.source import PolicyWeights
from tests.helpers.fits import cleaned_up, sampling
from tests.helpers.tiny import by_hand, random_rollouts, tiny_model

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
CLOSE, FAR = 0.05, 0.3
"""Mean gaps of logprobs: rounding to bfloat16 makes 0.01, other weights 0.7 and more."""
SEQUENCES = [[5, 6, 7, 8, 9, 10], [11, 4, 3], list(range(3, 31))]


def spread_out(model: Any, seed: int = 0) -> Any:
    """In place: weights large enough for attention and logprobs to differ from token to token."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=random).to(p.device))
    return model


def relative(found: torch.Tensor, right: torch.Tensor) -> float:
    found, right = found.detach().double(), right.detach().double()
    return float((found - right).norm() / right.norm())


# -- the head ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "bar"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)], ids=["float32", "bfloat16"])
def test_kernels_on_chunks_equal_float64(dtype: torch.dtype, bar: float) -> None:
    # 4 rows of logits at once forward (2048 // 300 = 6), 32 columns backward (2048 // 38 = 53): neither divides.
    n, d, v, chunk_size, temperature = 38, 24, 300, 2048, 0.7
    random = torch.Generator().manual_seed(0)
    shapes = ((n, d), (v, d), (v,), (2, n))
    *inputs, upstream = (torch.randn(shape, generator=random).to(DEVICE, dtype) for shape in shapes)
    targets = torch.randint(v, (n,), generator=random)
    targets[:8] = torch.tensor([0, 31, 32, 63, 64, 287, 288, 299])  # first and last of chunks
    targets = targets.to(DEVICE)

    exact = [x.double().requires_grad_() for x in inputs]
    scores = ((exact[0] @ exact[1].T + exact[2]) / temperature).log_softmax(-1)
    right = torch.stack([scores.gather(-1, targets[:, None])[:, 0], -(scores.exp() * scores).sum(-1)])
    (right * upstream).sum().backward()

    hidden, weight, bias = leaves = [x.clone().requires_grad_() for x in inputs]
    options = {"temperature": temperature, "chunk_size": chunk_size, "entropy_grad": True}
    found = torch.stack(chunked_token_logprobs(hidden, weight, targets, bias=bias, **options))
    (found * upstream).sum().backward()

    assert found.dtype == torch.float32
    assert relative(found[0], right[0]) < bar
    assert relative(found[1], right[1]) < bar
    for leaf, wanted in zip(leaves, exact, strict=True):
        assert leaf.grad.dtype == dtype
        assert relative(leaf.grad, wanted.grad) < bar


# -- attention ---------------------------------------------------------------------------------------------------------


def outcome(model: Any, rollouts: Any, *, packed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logprobs of all completion tokens, and the gradient of a weighted sum of them, end to end."""
    micro = pack(rollouts, temperature=0.7, share_prefix=packed).to(DEVICE)
    logprobs, _ = PolicyForward(packed)(model, micro)
    weights = torch.randn(len(logprobs), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    grads = torch.autograd.grad((logprobs * weights).sum(), list(model.parameters()))
    return logprobs.detach(), torch.cat([g.flatten().float() for g in grads])


def test_packed_rows_with_shared_prefixes_equal_padded_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, kernel = [], attention._varlen_attention

    def counted(*args: Any) -> torch.Tensor:
        calls.append(args[3].key_index is not None)
        return kernel(*args)

    monkeypatch.setattr(attention, "_varlen_attention", counted)
    model = spread_out(tiny_model()).to(DEVICE)
    rollouts = random_rollouts(12, longest=40, members=4)
    right = outcome(model, rollouts, packed=False)
    model.to(torch.bfloat16)
    padded = outcome(model, rollouts, packed=False)
    assert not calls
    packed = outcome(model, rollouts, packed=True)
    assert calls == [True, True], "each layer attends by the kernel, to shared keys"
    for exact, plain, found in zip(right, padded, packed, strict=True):
        assert relative(found, exact) < 3 * relative(plain, exact)  # what bfloat16 rounds is all that differs
        assert relative(plain, exact) < 0.05


# -- the engine --------------------------------------------------------------------------------------------------------


@contextmanager
def engine_of(policy: Any, store: Path, **args: Any) -> Iterator[Any]:
    pytest.importorskip("vllm")
    from lightrl.engines.vllm import VLLMEngine

    store.mkdir(exist_ok=True)
    with cleaned_up():
        backend = "cpu:gloo,cuda:nccl" if DEVICE.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{store}/store", rank=0, world_size=1)
        args = {"enforce_eager": True, "gpu_memory_utilization": 0.1} | args
        engine = VLLMEngine(
            policy, local_rank=0, device=DEVICE, dtype=torch.bfloat16, max_model_len=64, engine_args=args
        )
        try:
            yield engine
        finally:
            engine.close()


def mean_gap(policy: Any, sequences: list[list[int]], theirs: list[torch.Tensor]) -> float:
    """Mean |difference| of an engine's logprobs of the last tokens of each sequence and the policy's in bfloat16."""
    gaps = []
    for ids, found in zip(sequences, theirs, strict=True):
        token_ids = torch.tensor(ids, device=DEVICE)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            logits = policy(token_ids[None], use_cache=False).logits
        gaps.append(found - get_logprobs(logits, token_ids)[-len(found) :].cpu())
    return float(torch.cat(gaps).abs().mean())


@torch.no_grad()
def test_every_push_after_a_sleep_arrives(tmp_path: Path) -> None:
    policy = spread_out(tiny_model()).to(DEVICE)
    weights = PolicyWeights(policy, torch.bfloat16)
    with engine_of(policy, tmp_path) as engine:
        for seed in (1, 2, 3):  # compared in full, then by a plan that is bound to the policy's memory, then as bound
            engine.sleep()
            engine.wake_weights()
            engine.load_weights(weights)
            engine.wake_cache()
            assert mean_gap(policy, SEQUENCES, engine.score(SEQUENCES)) < CLOSE
            sampled = [c for group in engine.generate(SEQUENCES, sampling(), 0) for c in group]
            whole = [
                ids + c.token_ids for ids, c in zip([s for s in SEQUENCES for _ in range(3)], sampled, strict=True)
            ]
            assert mean_gap(policy, whole, [c.logprobs for c in sampled]) < CLOSE
            spread_out(policy, seed)
            assert mean_gap(policy, SEQUENCES, engine.score(SEQUENCES)) > FAR, "what is not pushed is seen"
        assert engine._loader._plan is not None, "pushes go by plan"


@torch.no_grad()
def test_tokens_scheduled_before_those_they_follow_are_known_are_right(tmp_path: Path) -> None:
    from lightrl.engines.shortcuts import ShortSchedule

    policy = spread_out(tiny_model()).to(DEVICE)
    policy.config.eos_token_id = None
    options = sampling(num_completions=6, max_completion_tokens=58, stop_token_ids=())
    with engine_of(policy, tmp_path, max_num_seqs=8) as engine:
        scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
        assert type(scheduler).__name__ == "AsyncScheduler"
        assert isinstance(scheduler.schedule, ShortSchedule)
        engine.load_weights(PolicyWeights(policy, torch.bfloat16))
        groups = engine.generate(SEQUENCES, options, 0)
    whole = [ids + c.token_ids for ids, group in zip(SEQUENCES, groups, strict=True) for c in group]
    assert [len(ids) for ids in whole] == [64] * 6 + [61] * 6 + [64] * 6  # ends of the context, and of a completion
    for ids, sampled in zip(whole, [c for group in groups for c in group], strict=True):
        assert mean_gap(policy, [ids], [sampled.logprobs]) < CLOSE


@pytest.mark.parametrize("recompute_kv", [False, True])
def test_tokens_amid_a_push_are_stamped_with_the_weights_that_sampled_them(recompute_kv: bool) -> None:
    pytest.importorskip("vllm")
    from lightrl.engines import compat
    from lightrl.engines.continuous import ContinuousEngine

    old, new = (spread_out(tiny_model(seed), seed) for seed in (0, 1))
    old.config.eos_token_id = None
    args = {"enforce_eager": True, "gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 2**28}
    compat.import_vllm()
    with cleaned_up(), compat.process_kept():
        engine = ContinuousEngine(EngineSpec(engine_config(old).to_dict(), "bfloat16", 64, engine_args=args))
        try:
            engine.load(PolicyWeights(old, torch.bfloat16), 0, recompute_kv)
            for i in range(16):
                engine.submit(Request(f"{i}", [5 + i, 6, 7], 24))
            for _ in range(12):
                assert engine.step() == []
            engine.load(PolicyWeights(new, torch.bfloat16), 1, recompute_kv)
            outputs = []
            while engine.busy:
                outputs += engine.step()
        finally:
            engine.close()
    off = torch.stack([off_by(old, [5 + int(o.id), 6, 7], completion(o)) for o in outputs]).mean(0)
    ((_, before), _), *others = [o.versions for o in outputs]
    assert others == [[(0, before), (1, 24 - before)]] * 15
    assert off[:before].max() < CLOSE * 2
    assert off[before:].min() > FAR


def off_by(policy: Any, prompt: list[int], sampled: Any) -> torch.Tensor:
    return (by_hand(policy, prompt, sampled.token_ids) - sampled.logprobs).abs()


@pytest.mark.parametrize(
    "args", [{}, {"enforce_eager": False, "max_cudagraph_capture_size": 8}], ids=["eager", "graphs"]
)
def test_an_ended_engine_gives_its_memory_back_and_another_may_follow(args: dict[str, Any], tmp_path: Path) -> None:
    policy, taken = tiny_model().to(DEVICE), []
    weights = PolicyWeights(policy, torch.bfloat16)
    for i in range(2 if args else 3):
        with engine_of(policy, tmp_path / str(i), **args) as engine:
            engine.sleep()
            engine.wake_weights()
            engine.load_weights(weights)
            engine.wake_cache()
            engine.generate(SEQUENCES, sampling(), 0)
            taken.append(torch.cuda.mem_get_info()[0])
            if i == 1:
                engine.sleep()  # as after the last rollout
        taken.append(torch.cuda.mem_get_info()[0])
    with_engine, without = taken[::2], taken[1::2]
    assert min(without) - max(with_engine) > 5 * 2**30  # a tenth of the device was an engine's
    assert without[0] - without[-1] < 2**28


# -- memory of another process -----------------------------------------------------------------------------------------


def mirrored(memories: Any, end: Any) -> None:
    here, elsewhere = (Mirror(m) for m in memories)
    end.send([m.tensor is m._there for m in (here, elsewhere)])
    while end.recv():
        for m in (here, elsewhere):
            m.refresh()
        end.send([m.tensor.tolist() for m in (here, elsewhere)])


def test_memory_of_another_process_is_seen_as_it_is_now() -> None:
    buffers, context = [SharedBuffer(8, DEVICE) for _ in range(2)], multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    memories = buffers[0].memory, structs.replace(buffers[1].memory, gpu="another")
    process = context.Process(target=mirrored, args=(memories, far))
    process.start()
    try:
        assert near.poll(60), "it did not open the memory"
        assert near.recv() == [True, False], "read where it lies, and copied"
        for value in (1, 2):
            for buffer in buffers:
                buffer.tensor.fill_(value)
            torch.cuda.synchronize()
            near.send(True)
            assert near.poll(60), "it did not look again"
            assert near.recv() == [[value] * 8] * 2
        near.send(False)
        process.join(60)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()
