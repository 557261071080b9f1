"""The demo's training: held-out pass@1 before and after, and the seconds that training took."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import Result

needs = "vllm"

ROOT = Path(__file__).resolve().parent.parent
PATTERNS = {
    "before": r"^held-out pass@1 before training: ([\d.]+)",
    "after": r"^held-out pass@1: ([\d.]+)\s*\Z",
    "seconds": r"^training took ([\d.]+) s",
}


def run_demo() -> str:
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}
    with tempfile.TemporaryDirectory() as folder:  # an earlier run's output must not count as this one's
        done = subprocess.run(
            [sys.executable, "-m", "examples.tiny.run"],
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=900,
        )
    if done.returncode:
        raise RuntimeError(f"examples.tiny.run exited with {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}")
    return done.stdout


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
