"""The demo's task with an engine of its own at max_staleness 0, 1 and 4: held-out pass@1, oldest rollout trained on."""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import Result
from benchmarks._subprocess import run_module

needs = "vllm"

LIMITS = (0, 1, 4)
STEPS, BAR = 60, 0.9


def train(limit: int, steps: int, out: Path) -> dict[str, Any]:
    from benchmarks.algorithms import train as train_demo
    from lightrl.corrections import TruncatedToken
    from lightrl.strategies import AsyncVLLMStrategy

    strategy = AsyncVLLMStrategy(max_staleness=limit)
    return {"limit": limit} | train_demo("GRPO", steps, strategy, out, correction=TruncatedToken())


def in_subprocess(limit: int, steps: int, folder: Path) -> dict[str, Any]:
    args = ("--only", limit, "--steps", steps, "--out", folder)
    run_module("benchmarks.async_demo", *args, timeout=1800, env={"OMP_NUM_THREADS": "1"})
    found: dict[str, Any] = json.loads((folder / f"{limit}.json").read_text())
    return found


def judge(rows: list[dict[str, Any]]) -> Result:
    table = [f"{'max_staleness':>13}{'oldest':>8}{'steps':>7}{'seconds':>9}{'before':>8}{'pass@1':>8}"]
    for r in rows:
        figures = f"{r['steps']:>7}{r['seconds']:>9.0f}{r['before']:>8.3f}{r['pass@1']:>8.3f}"
        table.append(f"{r['limit']:>13}{r['oldest']:>8.0f}{figures}")
    lowest, within = min(r["pass@1"] for r in rows), all(r["oldest"] <= r["limit"] for r in rows)
    return Result(
        figure=f"lowest pass@1 {lowest:.3f}, staleness {'within' if within else 'BEYOND'} its limit",
        bar=f">= {BAR} for each, within",
        ok=lowest >= BAR and within,
        table="\n".join(table),
    )


def main(limits: tuple[int, ...] = LIMITS, steps: int = STEPS) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        return judge([in_subprocess(limit, steps, Path(folder)) for limit in limits])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.async_demo", description="Train at one staleness.")
    parser.add_argument("--only", type=int, required=True, help="max_staleness")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, required=True, help="folder for the task's files, runs and LIMIT.json")
    args = parser.parse_args()
    row = train(args.only, args.steps, args.out)
    (args.out / f"{args.only}.json").write_text(json.dumps(row))
    print(judge([row]).table)
