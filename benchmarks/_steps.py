"""Steps of training in one set-up, in a program of its own: ``python -m benchmarks._steps FOLDER '{"devices": 2}'``."""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks._memory import Memory
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
    members: int = MEMBERS
    longest: int | None = None
    """Completion, in tokens; None: as goes with the shape."""
    steps: int = WARM + STEPS
    lr: float = 1e-6
    compiled: bool = True
    """The trainer's layers, on a GPU."""
    sleep: bool | None = None
    engine_args: dict[str, Any] = field(default_factory=dict, hash=False)
    """For vLLM, above those chosen here."""

    @property
    def gpus(self) -> int:
        return self.devices + self.num_engines * self.tensor_parallel_size

    @property
    def prompts(self) -> int:
        return int((2 if self.shape == "tiny" else PROMPTS) * self.gpus * self.share)

    @property
    def completion(self) -> int:
        return self.longest or (16 if self.shape == "tiny" else COMPLETION)


def reward(completion: str) -> float:
    return float(len(completion) % 7)


def run(setup: SetUp, timeout: float = 600.0) -> dict[str, float]:
    """Return medians of seconds by stage, and counts, of a fit in processes of its own."""
    return medians(steps_of(setup, timeout))


def steps_of(setup: SetUp, timeout: float, program: str = "benchmarks._steps") -> list[dict[str, float]]:
    """Return what each step took of a fit in processes of its own: of all steps, or of those within ``timeout``."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            run_module(program, folder, json.dumps(asdict(setup)), timeout=timeout)
        except subprocess.TimeoutExpired:
            if not list(Path(folder).glob("*.json")):
                raise
        steps: list[dict[str, float]] = json.loads(min(Path(folder).glob("*.json")).read_text())
        return steps


def medians(steps: list[dict[str, float]], warm: int = WARM) -> dict[str, float]:
    if len(steps) <= warm:
        raise ValueError(f"{len(steps)} steps were measured, the first {warm} of which do not count: give it more time")
    return {name: statistics.median(s[name] for s in steps[warm:]) for name in steps[warm]}


def note(folder: Path, steps: list[dict[str, float]]) -> None:
    """Write down what was measured so far: a time limit may end the program at any step."""
    path = folder / f"{os.environ.get('LOCAL_RANK', '0')}.json"
    path.with_suffix(".new").write_text(json.dumps(steps))
    path.with_suffix(".new").replace(path)
    print(f"step {len(steps)}: " + ", ".join(f"{k} {v:.4g}" for k, v in steps[-1].items()), flush=True)


def fit(setup: SetUp, noted: Callable[[list[dict[str, float]]], None] = lambda _: None) -> list[dict[str, float]]:
    """Train and return what each step took; ``noted`` is called after every one with what there is."""
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
        max_steps=setup.steps,
        gradient_clip_val=1.0,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[make_record(steps, noted)],
        log_every_n_steps=1,
    )
    policy = model_of(setup, trainer.strategy.root_device)
    if setup.tail:  # random weights stop at random: one token in MEAN_OF_TAIL
        every = 4 if setup.shape == "tiny" else MEAN_OF_TAIL
        policy.generation_config.eos_token_id = list(range(3, policy.config.vocab_size, every))
    compiled = on_gpu and setup.compiled
    # The correction also measures how far engine and trainer are apart.
    module = RLModule(policy, lr=setup.lr, torch_compile=compiled, correction=TruncatedToken())
    trainer.fit(module, data_of(setup))
    return steps


def strategy_of(setup: SetUp) -> Any:
    from lightrl.strategies import AsyncVLLMStrategy, ColocatedVLLMStrategy

    on_gpu = setup.shape != "tiny"
    share, tp = 0.85 if setup.num_engines else 0.45, setup.tensor_parallel_size
    args = ({"gpu_memory_utilization": share, "max_num_seqs": 512 * tp} if on_gpu else {}) | setup.engine_args
    if not setup.num_engines:
        return ColocatedVLLMStrategy(tensor_parallel_size=tp, engine_args=args, sleep=setup.sleep)
    return AsyncVLLMStrategy(
        setup.max_staleness, num_engines=setup.num_engines, tensor_parallel_size=tp, engine_args=args
    )


def model_of(setup: SetUp, device: Any) -> Any:
    if setup.shape != "tiny":
        return qwen3(device, shape=setup.shape)
    from tests.helpers.tiny import tiny_model

    return tiny_model(kv_heads=2)


def prompts_of(setup: SetUp) -> tuple[list[dict[str, str]], Any]:
    """Return a run's prompts and the tokenizer."""
    count = setup.prompts * setup.steps
    if setup.shape == "tiny":
        from tests.helpers.tiny import tiny_prompts, tiny_tokenizer

        return tiny_prompts(count), tiny_tokenizer()
    draw = random.Random(0)
    texts = ([f"t{draw.randrange(10, VOCAB)}" for _ in range(PROMPT)] for _ in range(count))
    return [{"prompt": " ".join(text)} for text in texts], word_tokenizer()


def data_of(setup: SetUp) -> Any:
    from lightrl import RolloutDataModule

    prompts, tokenizer = prompts_of(setup)
    return RolloutDataModule(
        prompts,
        reward=reward,
        tokenizer=tokenizer,
        group_size=setup.members,
        prompts_per_step=setup.prompts,
        max_completion_tokens=setup.completion,
        max_tokens_per_micro_batch=16_384,
    )


def make_record(steps: list[dict[str, float]], noted: Callable[[list[dict[str, float]]], None]) -> Any:
    import torch
    from lightning.pytorch import Callback

    class Record(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.memory = Memory(module.device)
            self.since = time.perf_counter()

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if module.device.type == "cuda":
                torch.cuda.synchronize()
            now, lengths = time.perf_counter(), [len(r.completion_ids) for r in batch.rollouts]
            step = {k: float(v) for k, v in trainer.callback_metrics.items()} | self.memory.now()
            step |= {"step": now - self.since, "tokens": float(sum(lengths)), "longest": float(max(lengths))}
            step["prompt_tokens"] = float(sum(len(r.prompt_ids) for r in batch.rollouts))
            steps.append(step)
            noted(steps)
            self.since = time.perf_counter()

    return Record()


def main(folder: str, setup: str) -> None:
    fit(SetUp(**json.loads(setup)), partial(note, Path(folder)))


if __name__ == "__main__":
    main(*sys.argv[1:])
