"""Each algorithm on the demo's task: held-out pass@1 after the same number of steps."""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import Result
from benchmarks._subprocess import run_module

needs = "vllm"

NAMES = ("GRPO", "DrGRPO", "DAPO", "RLOO", "REINFORCEPlusPlus", "GSPO", "CISPO", "OPO", "PPO")
STEPS, BAR, EVERY = 60, 0.8, 10


def train(name: str, steps: int, strategy: Any, out: Path, seed: int = 0, **module_args: Any) -> dict[str, Any]:
    """Train one algorithm as examples/tiny does, but for ``module_args``, and return its figures and curves."""
    from lightning.pytorch import seed_everything
    from lightning.pytorch.loggers import TensorBoardLogger

    from examples.tiny.curve import HELD_OUT
    from examples.tiny.task import write_task
    from examples.tiny.training import make_data, make_trainer
    from lightrl import algorithms
    from lightrl.report import read_scalars

    seed_everything(seed, verbose=False)
    task, logger = write_task(out), TensorBoardLogger(out, name="")
    module = getattr(algorithms, name)(task.model_dir, **{"lr": 1e-3} | module_args)
    data = make_data(task)
    trainer = make_trainer(
        strategy, steps, samples_every=None, val_check_interval=EVERY, logger=logger, enable_progress_bar=False
    )
    before = trainer.validate(module, data, verbose=False)[0]["val/pass@1"]
    started = time.perf_counter()
    trainer.fit(module, data)
    seconds = time.perf_counter() - started
    after = trainer.validate(module, data, verbose=False)[0]["val/pass@1"]
    scalars = read_scalars(logger.log_dir)
    return {
        "algorithm": name,
        "steps": trainer.global_step,
        "seconds": seconds,
        "before": before,
        "pass@1": after,
        "curve": scalars.get(HELD_OUT, ([], [])),
        "oldest": max(scalars["rollout/staleness_max"][1]),
    }


def in_subprocess(name: str, steps: int, strategy: str, folder: Path) -> dict[str, Any]:
    """An engine and a process group of its own for each."""
    args = ("--only", name, "--steps", steps, "--strategy", strategy, "--out", folder)
    run_module("benchmarks.algorithms", *args, timeout=1800)
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return found


def draw(rows: list[dict[str, Any]], picture: Path) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        for row in rows:
            axes.plot(*row["curve"], "o-", markersize=3, linewidth=1.3, label=row["algorithm"])
        axes.axhline(BAR, color="#999999", linewidth=0.8, linestyle="--")
        axes.set(title="Largest of three digits", xlabel="optimizer step", ylabel="held-out pass@1", ylim=(-0.02, 1.04))
        axes.grid(axis="y", color="#dddddd", linewidth=0.7)
        axes.legend(loc="lower right", frameon=False, fontsize=8)
        figure.savefig(picture, dpi=150)


def markdown(rows: list[dict[str, Any]], strategy: str) -> str:
    lines = [
        "# Algorithms on the demo's task",
        "",
        f"`python -m benchmarks algorithms`, strategy `{strategy}`, seed 0, lr 1e-3, all else as the classes have it.",
        "Seconds are of training, rollouts and evaluation included; DAPO samples up to ten rounds a step.",
        "",
        "| algorithm | steps | seconds | pass@1 before | held-out pass@1 |",
        "|---|---|---|---|---|",
    ]
    for r in rows:
        figures = f"{r['seconds']:.0f} | {r['before']:.3f} | {r['pass@1']:.3f}"
        lines.append(f"| {r['algorithm']} | {r['steps']} | {figures} |")
    return "\n".join([*lines, "", "![held-out pass@1 over steps](algorithms.png)", ""])


def judge(rows: list[dict[str, Any]]) -> Result:
    table = [f"{'algorithm':19}{'steps':>6}{'seconds':>9}{'before':>8}{'pass@1':>8}"]
    for r in rows:
        short = "" if r["pass@1"] >= BAR else "  short"
        table.append(f"{r['algorithm']:19}{r['steps']:6}{r['seconds']:9.0f}{r['before']:8.3f}{r['pass@1']:8.3f}{short}")
    worst = min(rows, key=lambda r: r["pass@1"])
    return Result(
        figure=f"lowest pass@1 {worst['pass@1']:.3f} ({worst['algorithm']}, {len(rows)} algorithms)",
        bar=f">= {BAR} for each",
        ok=worst["pass@1"] >= BAR,
        table="\n".join(table),
    )


def main(
    names: tuple[str, ...] = NAMES,
    steps: int = STEPS,
    strategy: str = "colocated_vllm",
    report: Path = Path(__file__).parent,
) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        rows = [in_subprocess(name, steps, strategy, Path(folder)) for name in names]
    draw(rows, report / "algorithms.png")
    (report / "algorithms.md").write_text(markdown(rows, strategy))
    return judge(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.algorithms", description="Train one algorithm.")
    parser.add_argument("--only", required=True, choices=NAMES)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--strategy", default="colocated_vllm")
    parser.add_argument("--out", type=Path, required=True, help="folder for the task's files, runs and NAME.json")
    args = parser.parse_args()
    found = train(args.only, args.steps, args.strategy, args.out)
    (args.out / f"{args.only}.json").write_text(json.dumps(found))
    print(judge([found]).table)
