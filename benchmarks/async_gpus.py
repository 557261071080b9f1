"""One GPU generates while another trains: a step of both beside the longer of generation and training alone."""

from typing import Any

from benchmarks import Result
from benchmarks._steps import SetUp, run

needs = "gpus vllm"
BAR, GAP = 1.12, 0.02
STAGES = ("step", "time/generate", "time/train_step", "time/weight_sync", "time/swap", "time/wait", "tokens", "peak")


def main(shape: str = "0.6B", **changes: Any) -> Result:
    """Measure, with ``changes`` to both :class:`SetUp`."""
    # Layers that are not compiled train about as long as the engine generates.
    work = {"shape": shape, "compiled": False, **changes}
    alone = run(SetUp(**work))
    print(row("one GPU, in turns", alone), flush=True)
    both = run(SetUp(num_engines=1, share=0.5, **work))
    return judge(alone, both)


def judge(alone: dict[str, float], both: dict[str, float]) -> Result:
    longer = max(alone["time/generate"], alone["time/train_step"])
    # Random tokens may end a completion early: equal work is compared.
    times = both["step"] / both["tokens"] * alone["tokens"] / longer
    table = [row("one GPU, in turns", alone), row("one trains, one generates", both)]
    in_turns, beside = alone["mismatch/logprob_diff_mean"], both["mismatch/logprob_diff_mean"]
    table.append(f"mean |dlogp| of engine and trainer: {in_turns:.4f} in turns, {beside:.4f} beside each other")
    return Result(
        f"{times:.2f} x the longer of {alone['time/generate']:.2f} s and {alone['time/train_step']:.2f} s",
        f"<= {BAR} x, mean |dlogp| <= {GAP} in turns",
        times <= BAR and in_turns <= GAP,
        "\n".join(table),
    )


def row(name: str, found: dict[str, float]) -> str:
    return f"{name:28}" + ", ".join(f"{n.removeprefix('time/')} {found[n]:.2f}" for n in STAGES if n in found)
