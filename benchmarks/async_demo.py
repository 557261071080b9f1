"""The demo's task with an engine of its own at max_staleness 0, 1 and 4: held-out pass@1, oldest rollout trained on.

All have the same settings. Steps of half the demo's size keep rollouts of four steps ago near the policy, and an
entropy bonus keeps it from giving up a digit that its first steps hardly tried, from which only luck brings it back.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import Result
from benchmarks._subprocess import run_module

needs = "vllm"

LIMITS, SEEDS = (0, 1, 4), (0, 1)
STEPS, BAR = 80, 0.9
SETTINGS = {"lr": 5e-4, "entropy_coef": 0.02}


def train(limit: int, seed: int, steps: int, out: Path) -> dict[str, Any]:
    from benchmarks.algorithms import train as train_demo
    from lightrl.corrections import TruncatedToken
    from lightrl.strategies import AsyncVLLMStrategy

    strategy = AsyncVLLMStrategy(max_staleness=limit)
    row = train_demo("GRPO", steps, strategy, out, seed, correction=TruncatedToken(), **SETTINGS)
    return {"limit": limit, "seed": seed} | row


def in_subprocess(limit: int, seed: int, steps: int, folder: Path) -> dict[str, Any]:
    args = ("--only", limit, "--seed", seed, "--steps", steps, "--out", folder)
    run_module("benchmarks.async_demo", *args, timeout=1800, env={"OMP_NUM_THREADS": "1"})
    found: dict[str, Any] = json.loads((folder / f"{limit}.json").read_text())
    return found


def judge(rows: list[dict[str, Any]]) -> Result:
    table = [f"{'max_staleness':>13}{'seed':>6}{'oldest':>8}{'steps':>7}{'seconds':>9}{'before':>8}{'pass@1':>8}"]
    for r in rows:
        figures = f"{r['steps']:>7}{r['seconds']:>9.0f}{r['before']:>8.3f}{r['pass@1']:>8.3f}"
        table.append(f"{r['limit']:>13}{r['seed']:>6}{r['oldest']:>8.0f}{figures}")
    lowest, within = min(r["pass@1"] for r in rows), all(r["oldest"] <= r["limit"] for r in rows)
    return Result(
        figure=f"lowest pass@1 {lowest:.3f}, staleness {'within' if within else 'BEYOND'} its limit",
        bar=f">= {BAR} for each, within",
        ok=lowest >= BAR and within,
        table="\n".join(table),
    )


def main(limits: tuple[int, ...] = LIMITS, seeds: tuple[int, ...] = SEEDS, steps: int = STEPS) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        return judge([in_subprocess(limit, seed, steps, Path(folder)) for limit in limits for seed in seeds])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.async_demo", description="Train at one staleness.")
    parser.add_argument("--only", type=int, required=True, help="max_staleness")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, required=True, help="folder for the task's files, runs and LIMIT.json")
    args = parser.parse_args()
    row = train(args.only, args.seed, args.steps, args.out)
    (args.out / f"{args.only}.json").write_text(json.dumps(row))
    print(judge([row]).table)
