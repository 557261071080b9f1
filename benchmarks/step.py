"""The whole colocated step on a GPU: 64 prompts of 128 tokens x 8 completions of 512, by stage, in seconds."""

import random
import statistics
import time
from typing import Any

from benchmarks import Result
from benchmarks._qwen3 import qwen3, word_tokenizer

needs = "gpu vllm"
PROMPTS, MEMBERS, PROMPT, COMPLETION = 64, 8, 128, 512
WARM, STEPS = 2, 4
BAR = 2.7 * 9_121  # completion tokens/s: 2.7 times TRL 1.16 on the same machine kind
STAGES = ("time/generate", "time/train_step", "time/weight_sync", "time/swap", "time/reward")


def reward(completion: str) -> float:
    return float(len(completion) % 7)


def main() -> Result:
    import torch
    from lightning.pytorch import Trainer

    from lightrl import RLModule, RolloutDataModule
    from lightrl.strategies import ColocatedVLLMStrategy

    draw = random.Random(0)
    words = [
        " ".join(f"t{draw.randrange(10, 151_936)}" for _ in range(PROMPT)) for _ in range(PROMPTS * (WARM + STEPS))
    ]
    data = RolloutDataModule(
        [{"prompt": text} for text in words],
        reward=reward,
        tokenizer=word_tokenizer(),
        group_size=MEMBERS,
        prompts_per_step=PROMPTS,
        max_completion_tokens=COMPLETION,
        max_tokens_per_micro_batch=16_384,
    )
    steps: list[dict[str, float]] = []
    strategy = ColocatedVLLMStrategy(engine_args={"gpu_memory_utilization": 0.45, "max_num_seqs": 512})
    trainer = Trainer(
        strategy=strategy,
        accelerator="gpu",
        devices=1,
        precision="bf16-mixed",
        max_steps=WARM + STEPS,
        gradient_clip_val=1.0,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[make_record(steps)],
        log_every_n_steps=1,
    )
    trainer.fit(RLModule(qwen3(torch.device("cuda", 0)), lr=1e-6, torch_compile=True), data)
    return judge(steps[WARM:], torch.cuda.max_memory_allocated() / 2**30)


def make_record(steps: list[dict[str, float]]) -> Any:
    import torch
    from lightning.pytorch import Callback

    class Record(Callback):
        def on_train_start(self, *_: Any) -> None:
            self.since = time.perf_counter()

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            torch.cuda.synchronize()
            now = time.perf_counter()
            steps.append({k: float(v) for k, v in trainer.callback_metrics.items()} | {"step": now - self.since})
            self.since = now

    return Record()


def judge(steps: list[dict[str, float]], peak: float) -> Result:
    whole = statistics.median(s["step"] for s in steps)
    rate = PROMPTS * MEMBERS * COMPLETION / whole
    shown = [name for name in STAGES if name in steps[0]]
    table = [f"{name:20} {', '.join(f'{s[name]:.2f}' for s in steps)}" for name in ("step", *shown)]
    table.append(f"kl/mismatch {steps[-1]['kl/mismatch']:.1e}; peak of torch's allocator {peak:.1f} GiB")
    return Result(
        f"{whole:.1f} s a step, {rate:,.0f} completion tokens/s", f">= {BAR:,.0f}", rate >= BAR, "\n".join(table)
    )
