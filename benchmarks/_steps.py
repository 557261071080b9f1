"""Steps of training in one set-up, in a program of its own: ``python -m benchmarks._steps FOLDER '{"devices": 2}'``."""

import json
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks._qwen3 import VOCAB, qwen3, word_tokenizer
from benchmarks._subprocess import run_module

PROMPTS, MEMBERS, PROMPT, COMPLETION = 64, 8, 128, 512
MEAN_OF_TAIL = 128
"""Tokens of a completion on average where lengths have a long tail; none is longer than ``COMPLETION``."""
WARM, STEPS = 2, 4


@dataclass(frozen=True)
class SetUp:
    """What is run; the work is as much for each GPU."""

    devices: int = 1
    """That train; without engines of their own they generate too."""
    tensor_parallel_size: int = 1
    num_engines: int = 0
    max_staleness: int = 1
    shape: str = "0.6B"
    """Of the model; ``"tiny"`` runs on CPUs."""
    tail: bool = False
    share: float = 1.0
    """Of the prompts of a step."""

    @property
    def gpus(self) -> int:
        return self.devices + self.num_engines * self.tensor_parallel_size

    @property
    def prompts(self) -> int:
        return int((2 if self.shape == "tiny" else PROMPTS) * self.gpus * self.share)

    @property
    def completion(self) -> int:
        return 16 if self.shape == "tiny" else COMPLETION


def reward(completion: str) -> float:
    return float(len(completion) % 7)


def run(setup: SetUp, timeout: float = 600.0) -> dict[str, float]:
    """Return medians of seconds by stage, and counts, of a fit in processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        run_module("benchmarks._steps", folder, json.dumps(asdict(setup)), timeout=timeout)
        steps = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    return medians(steps[0])


def medians(steps: list[dict[str, float]]) -> dict[str, float]:
    warm = steps[WARM:]
    return {name: statistics.median(s[name] for s in warm) for name in warm[0]}


def fit(setup: SetUp) -> list[dict[str, float]]:
    """Train and return what each step took."""
    from lightning.pytorch import Trainer

    from lightrl import RLModule
    from lightrl.corrections import TruncatedToken

    on_gpu = setup.shape != "tiny"
    steps: list[dict[str, float]] = []
    trainer = Trainer(
        strategy=strategy_of(setup),
        accelerator="gpu" if on_gpu else "cpu",
        devices=setup.devices,
        precision="bf16-mixed" if on_gpu else "32-true",
        max_steps=WARM + STEPS,
        gradient_clip_val=1.0,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[make_record(steps)],
        log_every_n_steps=1,
    )
    policy = model_of(setup, trainer.strategy.root_device)
    if setup.tail:  # random weights stop at random: one token in MEAN_OF_TAIL
        every = 4 if setup.shape == "tiny" else MEAN_OF_TAIL
        policy.generation_config.eos_token_id = list(range(3, policy.config.vocab_size, every))
    correction = TruncatedToken() if setup.num_engines else None
    trainer.fit(RLModule(policy, lr=1e-6, torch_compile=on_gpu, correction=correction), data_of(setup))
    return steps


def strategy_of(setup: SetUp) -> Any:
    from lightrl.strategies import AsyncVLLMStrategy, ColocatedVLLMStrategy

    on_gpu = setup.shape != "tiny"
    share = 0.85 if setup.num_engines else 0.45
    args = {"gpu_memory_utilization": share, "max_num_seqs": 512} if on_gpu else {}
    tp = setup.tensor_parallel_size
    if not setup.num_engines:
        return ColocatedVLLMStrategy(tensor_parallel_size=tp, engine_args=args)
    return AsyncVLLMStrategy(
        setup.max_staleness, num_engines=setup.num_engines, tensor_parallel_size=tp, engine_args=args
    )


def model_of(setup: SetUp, device: Any) -> Any:
    if setup.shape != "tiny":
        return qwen3(device, shape=setup.shape)
    from tests.helpers.tiny import tiny_model

    return tiny_model(kv_heads=2)


def data_of(setup: SetUp) -> Any:
    from lightrl import RolloutDataModule

    draw = random.Random(0)
    if setup.shape == "tiny":
        from tests.helpers.tiny import tiny_prompts, tiny_tokenizer

        prompts, tokenizer = tiny_prompts(setup.prompts * (WARM + STEPS)), tiny_tokenizer()
    else:
        tokenizer = word_tokenizer()
        texts = [
            [f"t{draw.randrange(10, VOCAB)}" for _ in range(PROMPT)] for _ in range(setup.prompts * (WARM + STEPS))
        ]
        prompts = [{"prompt": " ".join(text)} for text in texts]
    return RolloutDataModule(
        prompts,
        reward=reward,
        tokenizer=tokenizer,
        group_size=MEMBERS,
        prompts_per_step=setup.prompts,
        max_completion_tokens=setup.completion,
        max_tokens_per_micro_batch=16_384,
    )


def make_record(steps: list[dict[str, float]]) -> Any:
    import torch
    from lightning.pytorch import Callback

    class Record(Callback):
        def on_train_start(self, *_: Any) -> None:
            self.since = time.perf_counter()

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            peak = 0.0
            if module.device.type == "cuda":
                torch.cuda.synchronize()
                peak = torch.cuda.max_memory_allocated() / 2**30
            now, lengths = time.perf_counter(), [len(r.completion_ids) for r in batch.rollouts]
            step = {k: float(v) for k, v in trainer.callback_metrics.items()}
            step |= {"step": now - self.since, "peak": peak}
            steps.append(step | {"tokens": float(sum(lengths)), "longest": float(max(lengths))})
            self.since = now

    return Record()


def main(folder: str, setup: str) -> None:
    steps = fit(SetUp(**json.loads(setup)))
    Path(folder, f"{os.environ.get('LOCAL_RANK', '0')}.json").write_text(json.dumps(steps))


if __name__ == "__main__":
    main(*sys.argv[1:])
