"""Push of 1.2 GB into a colocated engine: milliseconds, and what the engine computes afterwards."""

import statistics
import tempfile
import time
from typing import Any

from benchmarks import Result
from benchmarks._qwen3 import IDS, changed, gap, qwen3

needs = "gpu vllm"
BAR_MS, BAR_GAP, BAR_AWAKE = 2.0, 0.1, 0.8
PUSHES, SLEEPS = 20, 5


def main() -> Result:
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    from lightrl.engines.vllm import VLLMEngine
    from lightrl.policy import decoder_layers

    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{folder}/store", rank=0, world_size=1)
        policy = qwen3(device)
        for layer in decoder_layers(policy):
            fully_shard(layer)
        fully_shard(policy)
        args = {"gpu_memory_utilization": 0.4, "max_num_seqs": 512}
        engine = VLLMEngine(
            policy, local_rank=0, device=device, dtype=torch.bfloat16, max_model_len=1024, engine_args=args
        )
        try:
            rows, ok = measure(engine, policy)
        finally:
            engine.close()
            dist.destroy_process_group()
    table = "\n".join(f"{name:44} {value}" for name, value in rows.items())
    return Result(rows["push, median"], f"<= {BAR_MS} ms", ok, table)


def measure(engine: Any, policy: Any) -> tuple[dict[str, str], bool]:
    import torch

    from lightrl.weights.source import PolicyWeights

    weights = PolicyWeights(policy, torch.bfloat16)
    first = seconds(lambda: engine.load_weights(weights))
    pushes, gaps = [], []
    for i in range(PUSHES):
        changed(policy, i)
        engine.sleep()
        engine.wake_weights()
        pushes.append(1000 * seconds(lambda: engine.load_weights(weights)))
        engine.wake_cache()
        gaps.append(gap(engine.score(IDS), policy))
    parts = {
        "of that, looking the policy's tensors up": 1000 * min(seconds(weights.held) for _ in range(5)),
        "of that, the engine's": 1000 * min(seconds(engine._loader._where) for _ in range(5)),
        "where the engine is awake, forgetting states": 1000
        * min(seconds(engine.llm.reset_prefix_cache) for _ in range(5)),
        "of that, copy and comparison": 1000 * min(seconds(engine._loader._copies.run) for _ in range(5)),
    }
    awake = [seconds(lambda: asleep_and_awake(engine, weights)) for _ in range(SLEEPS)]
    after = gap(engine.score(IDS), policy)
    median = statistics.median(pushes)
    rows = {
        "first push, plan and full comparison": f"{1000 * first:.0f} ms",
        "push, median": f"{median:.2f} ms (least {min(pushes):.2f}, most {max(pushes):.2f})",
        **{name: f"{value:.2f} ms" for name, value in parts.items()},
        "mean |dlogp| of engine and policy, largest": f"{max(gaps):.4f}",
        "sleep, wake and push, median": f"{statistics.median(awake):.3f} s; mean |dlogp| after {after:.4f}",
    }
    ok = median <= BAR_MS and max(*gaps, after) <= BAR_GAP and statistics.median(awake) <= BAR_AWAKE
    return rows, ok


def asleep_and_awake(engine: Any, weights: Any) -> None:
    engine.sleep()
    engine.wake_weights()
    engine.load_weights(weights)
    engine.wake_cache()


def seconds(act: Any) -> float:
    import torch

    torch.cuda.synchronize()
    started = time.perf_counter()
    act()
    torch.cuda.synchronize()
    return time.perf_counter() - started
