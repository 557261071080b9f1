"""The whole colocated step on a GPU, beside TRL's: 64 prompts of 128 tokens x 8 completions of 512, by stage."""

import importlib.util
import statistics
import subprocess
from typing import Any

from benchmarks import Result
from benchmarks._steps import WARM, SetUp, medians, steps_of

needs = "gpu vllm"
TIMES, RECORDED = 2.7, 9_121
"""The bar, and completion tokens/s of TRL 1.16 on one H200, for where it is not installed."""
TRL_STEPS, TRL_WARM = 3, 1
LIMIT = 270.0
"""Seconds for each side; what it has measured by then counts."""
STAGES = ("generate", "train_step", "weight_sync", "swap", "reward", "old_logprobs", "rollout_rest")


def main(limit: float = LIMIT, **changes: Any) -> Result:
    """Measure, with ``changes`` to lightrl's :class:`SetUp`."""
    setup = SetUp(**changes)
    theirs = baseline(limit, setup.shape)
    print("\n".join([head(), *theirs[1]]), flush=True)
    steps = steps_of(setup, limit)
    ours = medians(steps)
    print(row("lightrl", ours), flush=True)
    return judge(steps, *theirs)


def baseline(limit: float, shape: str) -> tuple[float | None, list[str]]:
    """Return TRL's completion tokens/s, None where it could not be measured, and lines that say what was."""
    if importlib.util.find_spec("trl") is None:
        return None, [f"TRL is not installed: {RECORDED:,} completion tokens/s, as recorded on one H200"]
    try:
        steps = steps_of(SetUp(shape=shape, steps=TRL_STEPS), limit, "benchmarks._trl")
        found = medians(steps, TRL_WARM)
    except (RuntimeError, ValueError, subprocess.TimeoutExpired) as error:
        return None, [f"TRL failed: {RECORDED:,} completion tokens/s, as recorded on one H200", f"{error}"]
    return found["tokens"] / found["step"], [row("TRL", found), spread(steps[TRL_WARM:])]


def head() -> str:
    names = ["step", *STAGES, "tokens/s", "generated/s", "trained/s", "torch GiB", "device GiB"]
    return f"{'seconds, medians':16}" + "".join(f"{name:>13}" for name in names)


def row(name: str, found: dict[str, float]) -> str:
    """Return a line of seconds, of tokens a second (of completions, by generation, in training), and of peaks."""
    seconds = [found["step"], *(found.get(f"time/{stage}", 0.0) for stage in STAGES)]
    generated = found["tokens"] / found["time/generate"] if found["time/generate"] else 0.0
    rates = [found["tokens"] / found["step"], generated, trained(found)]
    peaks = [found["peak"], found.get("device_peak", 0.0)]
    return (
        f"{name:16}"
        + "".join(f"{s:13.2f}" for s in seconds)
        + "".join(f"{r:13,.0f}" for r in rates)
        + "".join(f"{p:13.1f}" for p in peaks)
    )


def trained(found: dict[str, float]) -> float:
    """Tokens of all rollouts, each with its prompt, a second of training."""
    return (found["prompt_tokens"] + found["tokens"]) / found["time/train_step"]


def spread(steps: list[dict[str, float]]) -> str:
    whole = ", ".join(f"{s['step']:.2f}" for s in steps)
    return f"{'':16} steps of {whole} s; {statistics.median(s['tokens'] for s in steps):,.0f} tokens sampled in each"


def judge(steps: list[dict[str, float]], theirs: float | None, lines: list[str]) -> Result:
    ours = medians(steps)
    rate, other = ours["tokens"] / ours["step"], theirs or RECORDED
    against = f"TRL's {other:,.0f}" + ("" if theirs else " as recorded")
    table = [
        head(),
        *lines,
        row("lightrl", ours),
        spread(steps[WARM:]),
        f"{'':16} kl/mismatch {ours['kl/mismatch']:.1e}",
    ]
    return Result(
        f"{rate / other:.2f} x {against}: {ours['step']:.1f} s a step, {rate:,.0f} completion tokens/s",
        f">= {TIMES} x",
        rate >= TIMES * other,
        "\n".join(table),
    )
