"""A real model learns: SmolLM2-135M-Instruct on sums, in turns and at max_staleness 1 and 4, on one GPU.

Wall time counts from where the model's folder is there: imports, loading, engine start and evaluations are in it.
"""

import argparse
import json
import tempfile
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from benchmarks import Result
from benchmarks._arithmetic import LARGEST, TOKENS, make_rows, reward
from benchmarks._smollm2 import gguf_file, write_model
from benchmarks._subprocess import run_module

needs = "gpu vllm"
STALENESS = {"colocated": None, "staleness1": 1, "staleness4": 4}
GAIN, GAP, MINUTES = 0.3, 0.05, 15.0
SETTINGS: dict[str, Any] = {"lr": 2e-5, "warmup_steps": 5, "schedule": "linear"}
MEMBERS = 8


@dataclass(frozen=True)
class Size:
    """How much is run."""

    steps: int = 80
    prompts: int = 64
    """Of a step."""
    pairs: int = 128
    """Held out, each in both orders."""
    samples: int = 4
    """Of each held-out prompt."""
    every: int = 10
    """Steps between evaluations."""


TINY = Size(steps=2, prompts=2, pairs=2, samples=2, every=1)


def train(name: str, model: Any, size: Size, out: Path, tokenizer: Any = None, **settings: Any) -> dict[str, Any]:
    """Train on whatever device there is and return the curve; ``out`` has it from the first evaluation on."""
    started = time.perf_counter()
    import torch
    from lightning.pytorch import Trainer, seed_everything

    from lightrl import RLModule, RolloutDataModule
    from lightrl.callbacks import RolloutEvaluation
    from lightrl.corrections import TruncatedToken

    if size.steps % size.every:
        raise ValueError(f"steps={size.steps} must be a multiple of {size.every}: the last one is to be evaluated")
    seed_everything(0, verbose=False)
    on_gpu, limit = torch.cuda.is_available(), STALENESS[name]
    settings = SETTINGS | settings
    found = {"run": name, **settings, "limit": limit, "curve": [], "train": []}
    evaluation = RolloutEvaluation(k=1, samples=size.samples)
    trainer = Trainer(
        strategy=strategy_of(limit, on_gpu),
        accelerator="gpu" if on_gpu else "cpu",
        devices=1,
        precision="bf16-mixed" if on_gpu else "32-true",
        max_steps=size.steps,
        gradient_clip_val=1.0,
        val_check_interval=size.every,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=-1,  # step 0
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[evaluation, make_record(found, evaluation, started, out)],
    )
    train_rows, held_out = make_rows(size.pairs)
    data = RolloutDataModule(
        train_rows,
        reward=reward,
        group_size=MEMBERS,
        prompts_per_step=size.prompts,
        max_completion_tokens=TOKENS,
        val_prompts=held_out,
        tokenizer=tokenizer,
    )
    trainer.fit(RLModule(model, correction=None if limit is None else TruncatedToken(), **settings), data)
    return found


def strategy_of(limit: int | None, on_gpu: bool) -> Any:
    from lightrl.strategies import AsyncVLLMStrategy, ColocatedVLLMStrategy

    args = {"gpu_memory_utilization": 0.35, "max_num_seqs": 512} if on_gpu else {}
    if limit is None:
        return ColocatedVLLMStrategy(engine_args=args)
    return AsyncVLLMStrategy(limit, rollout_devices=[0] if on_gpu else None, engine_args=args)


def make_record(found: dict[str, Any], evaluation: Any, started: float, out: Path) -> Any:
    from lightning.pytorch import Callback

    class Record(Callback):
        def on_validation_end(self, trainer: Any, module: Any) -> None:
            passed = float(evaluation.passes["pass@1"].compute())
            point = {"step": trainer.global_step, "seconds": time.perf_counter() - started, "pass@1": passed}
            found["curve"].append(point)
            file_of(found["run"], out).write_text(json.dumps(found))
            print(json.dumps(point), flush=True)

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            step = {k: float(v) for k, v in trainer.callback_metrics.items() if not k.startswith("val/")}
            found["train"].append(step | {"seconds": time.perf_counter() - started})

    return Record()


def file_of(name: str, out: Path) -> Path:
    return out / f"{name}.json"


def train_tiny(name: str, out: Path, size: Size = TINY) -> dict[str, Any]:
    """Train a model of random weights that knows the answers as words."""
    from examples.tiny.task import VOCABULARY, make_model, make_tokenizer

    words = list(dict.fromkeys([*VOCABULARY, *(row["answer"] for part in make_rows() for row in part)]))
    return train(name, make_model(words=words), size, out, make_tokenizer(words))


def rise(row: dict[str, Any]) -> float:
    return float(row["curve"][-1]["pass@1"] - row["curve"][0]["pass@1"])


def oldest(row: dict[str, Any]) -> float:
    return max(step["rollout/staleness_max"] for step in row["train"])


def judge(rows: list[dict[str, Any]]) -> Result:
    """Judge the run in turns, which comes first, and the last by it."""
    last = [row["curve"][-1] for row in rows]
    gap = abs(last[-1]["pass@1"] - last[0]["pass@1"])
    figure = f"pass@1 {rise(rows[0]):+.3f} in {last[0]['seconds'] / 60:.1f} min, {gap:.3f} off at staleness 4"
    within = all(oldest(row) <= (row["limit"] or 0) for row in rows)
    return Result(
        figure=figure + ("" if within else ", older rollouts than allowed"),
        bar=f">= {GAIN} within {MINUTES:.0f} min, <= {GAP} off",
        ok=rise(rows[0]) >= GAIN and last[0]["seconds"] <= 60 * MINUTES and gap <= GAP and within,
        table=markdown(rows),
    )


def markdown(rows: list[dict[str, Any]]) -> str:
    lines = [f"| step | {' | '.join(row['run'] for row in rows)} |", "|---" * (len(rows) + 1) + "|"]
    for points in zip(*(row["curve"] for row in rows), strict=True):
        cells = [f"{p['pass@1']:.3f} at {p['seconds']:.0f} s" for p in points]
        lines.append(f"| {points[0]['step']} | {' | '.join(cells)} |")
    return "\n".join([*lines, f"| oldest rollout | {' | '.join(f'{oldest(row):.0f}' for row in rows)} |"])


def draw(rows: list[dict[str, Any]], picture: Path) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(9, 4), layout="constrained")
        axes = figure.subplots(1, 2, sharey=True)
        for row, (panel, key) in ((r, p) for r in rows for p in zip(axes, ("step", "seconds"), strict=True)):
            x, y = ([point[k] for point in row["curve"]] for k in (key, "pass@1"))
            panel.plot(x, y, "o-", markersize=3, linewidth=1.3, label=row["run"])
            panel.grid(axis="y", color="#dddddd", linewidth=0.7)
        axes[0].set(xlabel="optimizer step", ylabel="held-out pass@1", ylim=(-0.02, 1.04), title="SmolLM2-135M on sums")
        axes[1].set(xlabel="seconds, engine start included")
        axes[0].legend(loc="lower right", frameon=False, fontsize=8)
        figure.savefig(picture, dpi=150)


def publish(rows: list[dict[str, Any]], size: Size, report: Path) -> None:
    """Write smollm2.md and smollm2.png."""
    settings = ", ".join(f"{name} {rows[0][name]}" for name in SETTINGS)
    text = f"""# A real model learns

`python -m benchmarks smollm2`: SmolLM2-135M-Instruct (from 4 bits, all weights trained), GRPO on sums of
two numbers up to {LARGEST}, one GPU. {size.steps} steps of {size.prompts} prompts x {MEMBERS} completions of at most
{TOKENS} tokens; {settings}, clip 0.2, no KL, gradient norm 1; with an engine of its own `TruncatedToken()`. Held out:
{size.pairs} pairs in both orders, {size.samples} samples each at temperature 1. One seed. Seconds count from where the
model's folder is there: imports, engine start and evaluations are in them.

{markdown(rows)}

![held-out pass@1 over steps and seconds](smollm2.png)
"""
    (report / "smollm2.md").write_text(text)
    draw(rows, report / "smollm2.png")


def run_all(size: Size, out: Path, *more: object) -> list[dict[str, Any]]:
    """Return all runs, each in a process of its own; those that ``out`` has whole are not run again."""
    for name in STALENESS:
        if not is_done(name, size, out):
            sizes = [text for field in fields(size) for text in (f"--{field.name}", str(getattr(size, field.name)))]
            run_module("benchmarks.smollm2", "--only", name, "--out", out, *sizes, *more, timeout=60 * MINUTES)
    return [json.loads(file_of(name, out).read_text()) for name in STALENESS]


def is_done(name: str, size: Size, out: Path) -> bool:
    file = file_of(name, out)
    return file.exists() and json.loads(file.read_text())["curve"][-1]["step"] == size.steps


def main(report: Path = Path(__file__).parent) -> Result:
    gguf_file()  # its error is clearer than that of a process which lacks it
    with tempfile.TemporaryDirectory() as folder:
        rows = run_all(Size(), Path(folder))
    publish(rows, Size(), report)
    return judge(rows)


def command_line(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.smollm2",
        description="Train in one way, or in all that --out has not yet; table and picture are written there too.",
    )
    parser.add_argument("--only", choices=STALENESS)
    parser.add_argument("--out", type=Path, required=True, help="folder for NAME.json, table and picture")
    parser.add_argument("--model", type=Path, help="folder for the model, once made; OUT/model")
    parser.add_argument("--tiny", action="store_true", help="a model of random weights, in seconds")
    parser.add_argument("--lr", type=float, default=SETTINGS["lr"])
    for field in fields(Size):
        parser.add_argument(f"--{field.name}", type=int)
    args = parser.parse_args(argv)
    given = {field.name: value for field in fields(Size) if (value := getattr(args, field.name)) is not None}
    size = replace(TINY if args.tiny else Size(), **given)
    args.out.mkdir(parents=True, exist_ok=True)
    folder = args.model or args.out / "model"
    if args.only and args.tiny:
        train_tiny(args.only, args.out, size)
    elif args.only:
        train(args.only, str(write_model(folder)), size, args.out, lr=args.lr)
    else:
        flags = ["--tiny"] if args.tiny else ["--lr", args.lr]
        rows = run_all(size, args.out, "--model", folder, *flags)
        publish(rows, size, args.out)
        print(judge(rows).table, judge(rows).figure, sep="\n")


if __name__ == "__main__":
    command_line()
