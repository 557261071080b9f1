"""100 swaps between engine and trainer on a GPU at learning rate 0: neither their gap nor memory grows."""

import statistics
from typing import Any

from benchmarks import Result
from benchmarks._steps import SetUp, medians, steps_of

needs = "gpu vllm"
SWAPS, FEW = 100, 10
GAP, NOISE = 1.1, 1e-4
"""Last gap to first: each is a mean over 5,120 sampled tokens, known to about 2 %."""
GROWTH_MIB = 64.0
"""From swap ``FEW`` on. The device hands out pages of 2 MiB: one that is lost at every swap would add 180."""
LIMIT = 270.0
WORK: dict[str, Any] = {
    "share": 1 / 16,  # 4 prompts
    "members": 4,
    "longest": 32,
    "steps": SWAPS,
    "lr": 0.0,
    "sleep": True,  # though both fit
    "compiled": False,  # which would take longer than it saves
    "engine_args": {"max_num_seqs": 16},  # graphs for so many are captured sooner
}
SECONDS = ("step", "time/swap", "time/weight_sync", "time/generate", "time/train_step")
HELD = ("device", "reserved", "allocated", "host")


def main(limit: float = LIMIT, **changes: Any) -> Result:
    """Measure, with ``changes`` to the :class:`SetUp`."""
    return judge(steps_of(SetUp(**WORK | changes), limit), changes.get("steps", SWAPS))


def judge(steps: list[dict[str, float]], swaps: int = SWAPS, few: int = FEW) -> Result:
    if len(steps) < 2 * few:
        raise ValueError(f"only {len(steps)} swaps were made in time, of which the first and last {few} are compared")
    first, last = (
        statistics.mean(s["mismatch/logprob_diff_mean"] for s in part) for part in (steps[:few], steps[-few:])
    )
    held = [name for name in HELD if name in steps[-1]]
    growth = {name: 1024 * (steps[-1][name] - steps[few - 1][name]) for name in held}
    files = steps[-1]["files"] - steps[few - 1]["files"]
    rows = [few - 1, *range(2 * few - 1, len(steps), few)]
    table = [f"{'swap':>5} {'mean |dlogp|':>13} {'kl/mismatch':>12}" + "".join(f"{n + ' GiB':>15}" for n in held)]
    table += [line(i + 1, steps[i], held) for i in rows]
    table.append(
        f"growth from swap {few} on: {', '.join(f'{n} {g:+.1f} MiB' for n, g in growth.items())}, {files:+.0f} files"
    )
    took = medians(steps, few)
    table.append("median seconds: " + ", ".join(f"{n} {took[n]:.2f}" for n in SECONDS if n in took))
    grown = [name for name, amount in growth.items() if amount > GROWTH_MIB]
    ok = len(steps) == swaps and last <= GAP * first + NOISE and not grown and files <= 0
    return Result(
        f"{len(steps)} swaps, mean |dlogp| {first:.2e} at first and {last:.2e} at last, "
        f"{next(iter(growth))} {next(iter(growth.values())):+.1f} MiB",
        f"{swaps} swaps, last <= {GAP} x first, memory <= {GROWTH_MIB:.0f} MiB more and no file",
        ok,
        "\n".join(table),
    )


def line(swap: int, step: dict[str, float], held: list[str]) -> str:
    gaps = f"{step['mismatch/logprob_diff_mean']:13.2e} {step['kl/mismatch']:12.1e}"
    return f"{swap:5} {gaps}" + "".join(f"{step[n]:15.3f}" for n in held)
