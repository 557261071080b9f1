"""50 swaps between engine and trainer by hand: nothing grows, and training ends where it ends without them."""

import ctypes
import gc
import os
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from benchmarks import Result

needs = "vllm"

SWAPS, EVERY = 50, 10
FIRST = 10
"""Swaps until caches are full: growth is counted from there."""
GROWTH_MIB, GROWTH_OBJECTS = 4.0, 500
"""What 40 swaps may add: an allocator's slack, and entries of caches that are not full yet."""
BAR = 1e-4


def footprint() -> dict[str, float]:
    """What a process holds."""
    import psutil
    import torch
    from torch.distributed import distributed_c10d

    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)  # what was freed goes back: only what is held counts
    process = psutil.Process()
    return {
        "MiB": process.memory_info().rss / 2**20,
        "GPU MiB": torch.cuda.memory_allocated() / 2**20 if torch.cuda.is_available() else 0.0,
        "files": process.num_fds(),
        "threads": process.num_threads(),
        "Python threads": threading.active_count(),
        "objects": len(gc.get_objects()),
        "groups": len(distributed_c10d._world.pg_map),
    }


def step(manager: Any, rollouts: list[Any]) -> None:
    import torch

    from lightrl import clipped_policy_loss, get_logprobs

    model, optimizer = manager.as_trainable()
    optimizer.zero_grad()
    for i in torch.randperm(len(rollouts)).tolist():  # the order of sums depends on torch's random state
        r = rollouts[i]
        clipped_policy_loss(
            get_logprobs(model(r.token_ids).logits, r.token_ids), r.old_logprobs, r.advantage
        ).backward()
    optimizer.step()


def bits(manager: Any) -> list[Any]:
    return [v.clone() for state in manager.optimizer.state.values() for v in state.values()]


def measure(swaps: int, folder: Path) -> dict[str, Any]:
    import torch
    from vllm import SamplingParams

    from examples.own_the_loop.data import chat_prompts, reward
    from examples.tiny.task import write_task
    from lightrl import WeightManager, parse_vllm_outputs

    task = write_task(folder)
    prompts, truths = zip(*chat_prompts(task)[:8], strict=True)
    swapped, alone = (WeightManager(task.model_dir, lr=1e-3) for _ in range(2))
    how = SamplingParams(n=4, logprobs=0, max_tokens=4)
    rows: list[dict[str, float]] = []
    kept, gap, rollouts = True, 0.0, []
    torch.manual_seed(0)
    for i in range(1, swaps + 1):
        before = bits(swapped)
        outputs = swapped.as_vllm(max_model_len=32).generate(list(prompts), how, use_tqdm=False)
        model, _ = swapped.as_trainable()
        kept &= all(torch.equal(a, b) for a, b in zip(before, bits(swapped), strict=True))
        batches = parse_vllm_outputs(outputs, 4, reward, truths)
        gap = max(gap, *(difference(model, r) for b in batches for r in b))
        if not rollouts:
            for batch in batches:
                batch.compute_advantages()
            rollouts = [r for b in batches for r in b]
        step(swapped, rollouts)
        if i == FIRST or i % EVERY == 0:
            rows.append({"swap": i} | footprint())
    torch.manual_seed(0)
    for _ in range(swaps):
        step(alone, rollouts)
    pairs = zip(swapped.policy.parameters(), alone.policy.parameters(), strict=True)
    same = all(torch.equal(a, b) for a, b in pairs)
    return {"rows": rows, "kept": kept, "gap": gap, "same": same, "pushes": swapped.pushes}


def difference(model: Any, rollout: Any) -> float:
    """Largest |difference| between the engine's logprobs of a completion and the module's."""
    import torch

    from lightrl import get_logprobs

    with torch.no_grad():
        found = get_logprobs(model(rollout.token_ids).logits, rollout.token_ids)[-len(rollout.completion_ids) :]
    return float((found.cpu() - rollout.rollout_logprobs).abs().max())


def judge(found: dict[str, Any]) -> Result:
    rows, last = found["rows"], found["rows"][-1]
    names = [n for n in last if n != "swap"]
    table = [f"{'swap':>5}" + "".join(f"{n:>16}" for n in names)]
    table += [f"{r['swap']:5.0f}" + "".join(f"{r[n]:16.1f}" for n in names) for r in rows]
    growth = {n: last[n] - rows[0][n] for n in names}
    allowed = {"MiB": GROWTH_MIB, "GPU MiB": 0.0, "objects": GROWTH_OBJECTS}
    grown = [n for n in names if growth[n] > allowed.get(n, 0)]
    table.append(f"growth from swap {FIRST} on: " + ", ".join(f"{n} {growth[n]:+.1f}" for n in names))
    table.append(f"optimizer state kept bit for bit: {found['kept']}; same weights as without swaps: {found['same']}")
    ok = not grown and found["kept"] and found["same"] and found["gap"] <= BAR and found["pushes"] == last["swap"]
    what = f"{', '.join(grown)} grew" if grown else "nothing grew"
    return Result(
        figure=f"{last['swap']:.0f} swaps, {what} ({growth['MiB']:+.1f} MiB), logprobs within {found['gap']:.1e}",
        bar=f"{SWAPS} swaps, nothing grows (memory <= {GROWTH_MIB:.0f} MiB), state and weights bitwise, <= {BAR:.0e}",
        ok=ok,
        table="\n".join(table),
    )


def main() -> Result:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        return judge(measure(SWAPS, Path(folder)))
