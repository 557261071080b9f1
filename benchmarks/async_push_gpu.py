"""Push of 1.2 GB into the engine of another process while 256 requests run: pause, and time of a push by transport."""

import asyncio
import statistics
import time
from typing import Any

from benchmarks import Result
from benchmarks._qwen3 import IDS, changed, gap, qwen3

needs = "gpu vllm"
BAR_MS, BAR_GAP = 60.0, 0.1
REQUESTS, TOKENS, PUSHES = 256, 384, 4


def main() -> Result:
    import torch

    from lightrl.engines.messages import EngineSpec
    from lightrl.engines.vllm import engine_config
    from lightrl.pools.launchers import LocalLauncher
    from lightrl.pools.pool import EnginePool

    there = torch.cuda.device_count() - 1
    policy = qwen3(torch.device("cuda", 0))
    args = {"gpu_memory_utilization": 0.4, "max_num_seqs": 512}
    spec = EngineSpec(engine_config(policy).to_dict(), "bfloat16", max_model_len=1024, engine_args=args)
    pool = EnginePool(LocalLauncher(1, [[str(there)]]), spec, max_restarts=0)
    try:
        pool.start()
        rows, ok = measure(pool, policy)
    finally:
        pool.close()
    title = f"engine on {'another GPU' if there else 'the same GPU'}, milliseconds"
    head = f"{title:36} {'pack':>8} {'push':>8} {'pause':>8} {'a push costs generation':>24} {'mean |dlogp|':>13}"
    pause = max(float(r.split()[-3]) for r in rows if "kept" in r)
    return Result(f"{pause:.1f} ms pause", f"<= {BAR_MS} ms", ok, "\n".join([head, *rows]))


def measure(pool: Any, policy: Any) -> tuple[list[str], bool]:
    import torch

    from lightrl.pools.outbox import Outbox
    from lightrl.weights.source import PolicyWeights

    weights = PolicyWeights(policy, torch.bfloat16)
    outboxes = {name: Outbox(name, torch.device("cuda", 0), "local") for name in ("cuda_ipc", "wire")}
    rows, ok, version = [], True, 0
    pushed(pool, weights, version, False, outboxes["cuda_ipc"])  # the first is compared in full
    generated(pool, "warm")
    alone = generated(pool, "alone")
    for name, outbox in outboxes.items():
        for recompute in (False, True):
            times = []
            started, running = time.perf_counter(), begin(pool, f"{name}{recompute}")
            for _ in range(PUSHES):
                time.sleep(0.2)
                version += 1
                changed(policy, version)
                torch.cuda.synchronize()
                times.append(pushed(pool, weights, version, recompute, outbox))
            running.result(120)
            cost = 1000 * (time.perf_counter() - started - alone) / PUSHES
            pack, push, pause = (1000 * statistics.median(column) for column in zip(*times, strict=True))
            (scores,) = pool.call(pool.score(IDS), timeout=60, what="scores")
            difference = gap(scores, policy)
            kv = "states again" if recompute else "states kept"
            rows.append(f"{name + ', ' + kv:36} {pack:8.1f} {push:8.1f} {pause:8.1f} {cost:24.1f} {difference:13.4f}")
            ok &= difference <= BAR_GAP and (name != "cuda_ipc" or recompute or pause <= BAR_MS)
    return rows, ok


def pushed(pool: Any, weights: Any, version: int, recompute: bool, outbox: Any) -> tuple[float, float, float]:
    """Return seconds of packing, of the push, and that the engine stood still."""
    started = time.perf_counter()
    outbox.open(pool)
    shipment = outbox.pack(weights, version, recompute)
    packed = time.perf_counter()
    pool.push(shipment)
    return packed - started, time.perf_counter() - packed, max(pool.pauses)


def begin(pool: Any, name: str) -> Any:
    from lightrl.engines.messages import Request

    requests = [Request(f"{name}.{i}", [10 + i, *range(100, 227)], TOKENS) for i in range(REQUESTS)]
    return asyncio.run_coroutine_threadsafe(pool.generate(requests), pool.loop)


def generated(pool: Any, name: str) -> float:
    started = time.perf_counter()
    begin(pool, name).result(120)
    return time.perf_counter() - started
