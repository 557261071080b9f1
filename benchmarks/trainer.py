"""Trainer on a GPU: tokens/s of whole steps on packed rows of 16k tokens with ragged lengths, and peak memory."""

import sys
import time
from typing import Any

from benchmarks import Result
from benchmarks._qwen3 import qwen3

needs = "gpu"
BAR_TOKENS, BAR_GIB = 100_000, 32.0
MICRO_TOKENS, MICRO_BATCHES, SHORTEST, LONGEST, PROMPT = 16_384, 8, 64, 1024, 16
WARM, STEPS = 2, 4
PEAK_FLOPS = 989e12
FLOPS_PER_TOKEN = 6 * 596.05e6 + 0.176e9  # attention at a mean length of about 512


def main(profile: bool = False) -> Result:
    import torch
    from lightning.pytorch import Trainer

    from lightrl import RLModule
    from lightrl.strategies import ColocatedHFStrategy

    seconds: list[float] = []
    module = RLModule(qwen3(torch.device("cuda", 0)), lr=1e-6, torch_compile=True)
    step = make_step()
    tokens = sum(m.num_tokens for m in step.micro)
    trainer = Trainer(
        strategy=ColocatedHFStrategy(),
        accelerator="gpu",
        devices=1,
        precision="bf16-mixed",
        max_steps=WARM + STEPS,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[make_clock(seconds, profile)],
    )
    trainer.fit(module, Steps(step))
    rate = tokens * STEPS / sum(seconds[WARM : WARM + STEPS])
    peak = torch.cuda.max_memory_allocated() / 2**30
    table = [
        f"{MICRO_BATCHES} micro-batches of {tokens // MICRO_BATCHES} tokens, lengths {SHORTEST}..{LONGEST}, bf16-mixed",
        f"seconds a step: {', '.join(f'{s:.3f}' for s in seconds)} (the first {WARM} compile)",
        f"{rate:,.0f} tokens/s, {100 * rate * FLOPS_PER_TOKEN / PEAK_FLOPS:.1f}% MFU, peak {peak:.1f} GiB",
    ]
    return Result(
        f"{rate / 1000:.0f}k tokens/s, peak {peak:.1f} GiB",
        f">= {BAR_TOKENS // 1000}k, <= {BAR_GIB:.0f} GiB",
        rate >= BAR_TOKENS and peak <= BAR_GIB,
        "\n".join(table),
    )


def make_step() -> Any:
    import torch

    from lightrl import Rollout
    from lightrl.packing import StepBatch, pack

    draw = torch.Generator().manual_seed(0)
    micros: list[Any] = []
    rollouts: list[Any] = []
    size = 0
    while len(micros) < MICRO_BATCHES:
        length = int(torch.randint(SHORTEST, LONGEST + 1, (), generator=draw))
        if size + length > MICRO_TOKENS:
            micros.append(pack(rollouts, temperature=1.0, denominator=MICRO_TOKENS * MICRO_BATCHES))
            rollouts, size = [], 0
        ids = torch.randint(10, 150_000, (length,), generator=draw).tolist()
        rollout = Rollout(ids[:PROMPT], ids[PROMPT:], torch.full((length - PROMPT,), -12.0), group_id=len(rollouts))
        rollout.advantage = float(torch.randn((), generator=draw))
        rollouts.append(rollout)
        size += length
    return StepBatch(micros, 0)


def make_clock(seconds: list[float], profile: bool) -> Any:
    import torch
    from lightning.pytorch import Callback

    class Clock(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            torch.cuda.synchronize()
            if profile and trainer.global_step == WARM + STEPS - 1:
                self.profiler = torch.profiler.profile()
                self.profiler.__enter__()
            self.started = time.perf_counter()

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - self.started)
            if profile and trainer.global_step == WARM + STEPS:
                self.profiler.__exit__(None, None, None)
                for key in ("self_cuda_time_total", "self_cpu_time_total"):
                    print(self.profiler.key_averages().table(sort_by=key, row_limit=32, max_name_column_width=60))

    return Clock()


class Steps:
    """A sized loader of one step again and again."""

    def __init__(self, step: Any) -> None:
        self.step = step

    def __len__(self) -> int:
        return WARM + STEPS

    def __iter__(self) -> Any:
        for _ in range(len(self)):
            yield self.step


if __name__ == "__main__":
    print(main(profile="--profile" in sys.argv[1:]).table)
