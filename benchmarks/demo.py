"""The demo's training: held-out pass@1 before and after, and the seconds that training took."""

import re
import tempfile
from pathlib import Path

from benchmarks import Result
from benchmarks._subprocess import run_module

needs = "vllm"

PATTERNS = {
    "before": r"^held-out pass@1 before training: ([\d.]+)",
    "after": r"^held-out pass@1: ([\d.]+)\s*\Z",
    "seconds": r"^training took ([\d.]+) s",
}


def run_demo() -> str:
    with tempfile.TemporaryDirectory() as folder:  # an earlier run's output must not count as this one's
        return run_module("examples.tiny.run", timeout=900, cwd=Path(folder))


def parse(output: str) -> dict[str, float]:
    figures = {}
    for name, pattern in PATTERNS.items():
        found = re.search(pattern, output, re.MULTILINE)
        if found is None:
            raise RuntimeError(f"no line matches {pattern!r} in the demo's output, which ends:\n{output[-2000:]}")
        figures[name] = float(found[1])
    return figures


def judge(figures: dict[str, float]) -> Result:
    before, after, seconds = figures["before"], figures["after"], figures["seconds"]
    rows = [
        ("held-out pass@1 before training", f"{before:.3f}", "< 0.2", before < 0.2),
        ("held-out pass@1 after training", f"{after:.3f}", ">= 0.95", after >= 0.95),
        ("training, seconds", f"{seconds:.0f}", "< 180", seconds < 180),
    ]
    table = [f"{'measured':33}{'figure':>8}  {'bar':8}"]
    table += [f"{what:33}{figure:>8}  {bar:8}{'' if ok else ' short'}" for what, figure, bar, ok in rows]
    return Result(
        figure=f"pass@1 {before:.3f} -> {after:.3f} in {seconds:.0f} s",
        bar="< 0.2 -> >= 0.95 in < 180 s",
        ok=all(ok for *_, ok in rows),
        table="\n".join(table),
    )


def main() -> Result:
    return judge(parse(run_demo()))
