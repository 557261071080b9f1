"""The whole colocated step on a GPU: 64 prompts of 128 tokens x 8 completions of 512, by stage, in seconds."""

from benchmarks import Result
from benchmarks._steps import COMPLETION, MEMBERS, PROMPTS, WARM, SetUp, fit, medians

needs = "gpu vllm"
BAR = 2.7 * 9_121  # completion tokens/s: 2.7 times TRL 1.16 on the same machine kind
STAGES = ("time/generate", "time/train_step", "time/weight_sync", "time/swap", "time/reward")


def main() -> Result:
    return judge(fit(SetUp()))


def judge(steps: list[dict[str, float]]) -> Result:
    whole = medians(steps)["step"]
    rate = PROMPTS * MEMBERS * COMPLETION / whole
    shown = [name for name in STAGES if name in steps[-1]]
    table = [f"{name:20} {', '.join(f'{s[name]:.2f}' for s in steps[WARM:])}" for name in ("step", *shown)]
    table.append(f"kl/mismatch {steps[-1]['kl/mismatch']:.1e}; peak of torch's allocator {steps[-1]['peak']:.1f} GiB")
    return Result(
        f"{whole:.1f} s a step, {rate:,.0f} completion tokens/s", f">= {BAR:,.0f}", rate >= BAR, "\n".join(table)
    )
