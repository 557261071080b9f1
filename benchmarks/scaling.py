"""Training on 1, 2, 4, 8 GPUs, in turns and asynchronous, with as much work for each: rate, push, swap, memory."""

import itertools
from typing import Any

from benchmarks import Result
from benchmarks._steps import SetUp, run

needs = "gpus vllm"
GPUS = (1, 2, 4, 8)
SCALES, PUSHES, NOISE = 0.9, 1.5, 1.05
COLUMNS = (
    "step",
    "time/generate",
    "time/train_step",
    "time/weight_sync",
    "time/swap",
    "peak",
    "mismatch/logprob_diff_mean",
)


def colocated(gpus: int, shape: str, **more: Any) -> list[SetUp]:
    counts = [n for n in GPUS if n <= gpus]
    both = [(n, tp) for n, tp in itertools.product(counts, (1, 2, 4)) if tp <= n]
    return [SetUp(devices=n, tensor_parallel_size=tp, shape=shape, **more) for n, tp in both]


def asynchronous(gpus: int, shape: str, **more: Any) -> list[SetUp]:
    return [SetUp(devices=gpus - n, num_engines=n, shape=shape, **more) for n in range(1, gpus)]


def rate(setup: SetUp, found: dict[str, float]) -> float:
    """Completion tokens a second and GPU."""
    return found["tokens"] * setup.devices / found["step"] / setup.gpus


def row(setup: SetUp, found: dict[str, float]) -> str:
    kind = f"{setup.devices} train, {setup.num_engines} generate" if setup.num_engines else f"{setup.devices} in turns"
    name = f"{setup.shape}, {kind}, TP {setup.tensor_parallel_size}{', long tail' if setup.tail else ''}"
    figures = " ".join(f"{found.get(c, float('nan')):10.4f}" for c in COLUMNS)
    return f"{name:44} {rate(setup, found):10.0f} {figures}"


def planned(whole: dict[str, float], half: dict[str, float], gpus: int) -> Any:
    """What ``lightrl plan`` makes of the same steps."""
    from lightrl.cli.measure import step_of
    from lightrl.planning import make_plan

    names = {"generate": "generate", "train": "train_step", "reward": "reward", "sync": "weight_sync", "swap": "swap"}
    full, part = (
        {stage: found.get(f"time/{name}", 0.0) for stage, name in names.items()}
        | {"tokens": found["tokens"], "longest": found["longest"]}
        for found in (whole, half)
    )
    return make_plan(step_of(full, part), devices=gpus)


def compare(gpus: int, shape: str, tail: bool, found: dict[SetUp, dict[str, float]]) -> tuple[list[str], bool]:
    """Return what the plan says beside what was measured on all GPUs, and whether it was right."""
    turns = SetUp(devices=gpus, shape=shape, tail=tail)
    half = run(SetUp(devices=gpus, shape=shape, tail=tail, share=0.5))
    plan = planned(found[turns], half, gpus)
    splits = {s: found[s]["step"] for s in asynchronous(gpus, shape, tail=tail)}
    best = min(splits.values())
    faster = found[turns]["step"] / best
    right = (plan.gain > 1) == (faster > 1) or abs(faster - 1) < NOISE - 1
    measured = f"measured: asynchronous {faster:.2f} times as fast, {best / min(plan.splits):.2f} x its bound"
    return [f"-- {'long tail' if tail else 'equal lengths'} --", plan.table(), measured], right


def main(gpus: int | None = None, shape: str = "0.6B", big: str | None = "4B") -> Result:
    import torch

    gpus = gpus or max(n for n in GPUS if n <= torch.cuda.device_count())
    setups = colocated(gpus, shape) + [SetUp(devices=gpus, shape=shape, tail=True)]
    setups += asynchronous(gpus, shape) + asynchronous(gpus, shape, tail=True)
    setups += [SetUp(devices=n, shape=big) for n in GPUS if n <= gpus] if big else []
    found: dict[SetUp, dict[str, float]] = {}
    for setup in setups:
        found[setup] = run(setup)
        print(row(setup, found[setup]), flush=True)
    one, all_ = SetUp(shape=shape), SetUp(devices=gpus, shape=shape)
    kept = rate(all_, found[all_]) / rate(one, found[one])
    by_engines = [found[s]["time/weight_sync"] for s in asynchronous(gpus, shape)]
    pushes = by_engines[-1] / by_engines[0]
    verdicts = [compare(gpus, shape, tail, found) for tail in (False, True)]
    right = sum(ok for _, ok in verdicts)
    return Result(
        f"{kept:.2f} of one GPU's rate on {gpus}, push to {gpus - 1} engines {pushes:.2f} x to one, "
        f"{right} of 2 verdicts right",
        f">= {SCALES}, <= {PUSHES} x, all right",
        kept >= SCALES and pushes <= PUSHES and right == 2,
        "\n".join(line for lines, _ in verdicts for line in lines),
    )
