"""500 steps of the demo with validation, logging and checkpoints: resident memory, open files and threads stay flat."""

import argparse
import importlib.util
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import Result
from benchmarks._subprocess import run_module

STEPS, EVERY = 500, 5
SETTLED = 0.4
"""Share of the run after which nothing may grow: by then every cache has seen every length."""
GROWTH = {"memory": 8.0, "files": 0.5, "threads": 0.5}
"""How much each may grow, by the fitted line, over a run of so many steps: MiB, and numbers of them."""


def read_gauges() -> dict[str, float]:
    """Resident MiB, open files and threads of this process."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "memory": int(status["VmRSS"].split()[0]) / 1024,
        "files": float(len(os.listdir("/proc/self/fd"))),
        "threads": float(status["Threads"]),
    }


def train(steps: int, out: Path) -> list[dict[str, float]]:
    from lightning.pytorch import Callback
    from lightning.pytorch.loggers import TensorBoardLogger

    from examples.tiny.task import write_task
    from examples.tiny.training import make_data, make_trainer
    from lightrl import RLModule
    from lightrl.callbacks import RolloutCheckpoint, SampleTable

    rows: list[dict[str, float]] = []

    class Gauges(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step % EVERY == 0:
                rows.append({"step": trainer.global_step} | read_gauges())

    task = write_task(out)
    strategy = "colocated_vllm" if importlib.util.find_spec("vllm") else "colocated_hf"
    callbacks = [SampleTable(50), RolloutCheckpoint(out / "checkpoints", every_n_steps=20, export=True), Gauges()]
    trainer = make_trainer(
        strategy,
        steps,
        logger=TensorBoardLogger(out, name=""),
        callbacks=callbacks,
        enable_checkpointing=True,
        enable_progress_bar=False,
        max_epochs=-1,
        limit_val_batches=1,
    )
    data = make_data(task, prompts_per_step=16, group_size=8, val_batch_size=32)
    trainer.fit(RLModule(task.model_dir, lr=1e-3), data)
    return rows


def slope(xs: list[float], ys: list[float]) -> float:
    """Return the slope of the line of least squares.

    Example:
        >>> slope([0.0, 1.0, 2.0], [5.0, 7.0, 9.0])
        2.0
    """
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)


def judge(rows: list[dict[str, float]], steps: int) -> Result:
    settled = [r for r in rows if r["step"] > SETTLED * steps]
    table, flat, told = [f"{'':10}{'first':>10}{'settled':>10}{'last':>10}{'growth':>10}{'bar':>10}"], True, []
    for name, bar in GROWTH.items():
        growth = slope([r["step"] for r in settled], [r[name] for r in settled]) * steps
        flat &= growth <= bar
        told.append(f"{name} {growth:+.1f}")
        cells = (rows[0][name], settled[0][name], rows[-1][name], growth, bar)
        table.append(f"{name:10}" + "".join(f"{c:>10.1f}" for c in cells))
    return Result(
        figure=f"over {steps} steps: {', '.join(told)}",
        bar=f"at most {GROWTH['memory']:.0f} MiB, no file, no thread",
        ok=flat and rows[-1]["step"] == steps,
        table="\n".join(table),
    )


def main(steps: int = STEPS) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        run_module("benchmarks.soak", "--steps", steps, "--out", folder, timeout=3600, env={"OMP_NUM_THREADS": "1"})
        return judge(json.loads((Path(folder) / "rows.json").read_text()), steps)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description="Train, and write what grew.")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, required=True, help="folder for the task's files, the run and rows.json")
    args = parser.parse_args()
    found = train(args.steps, args.out)
    (args.out / "rows.json").write_text(json.dumps(found))
    print(judge(found, args.steps).table)
