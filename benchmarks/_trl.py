"""The same steps by TRL, in a program of its own: ``python -m benchmarks._trl FOLDER '{"steps": 3}'``.

Its ``GRPOTrainer`` as it comes (activations computed again, old logprobs computed), with vLLM in the same process that
sleeps while it trains, and the work, precision and learning rate of :class:`benchmarks._steps.SetUp`.
"""

import json
import os
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks._memory import Memory
from benchmarks._steps import SetUp, model_of, note, prompts_of, reward

MICRO_BATCH = 32
"""Sequences of 128 + 512 tokens: a quarter more than fits into lightrl's micro-batch."""
INSIDE = ("generate", "weight_sync", "swap", "old_logprobs", "rollout_rest")
"""Stages that are timed; what is left of a step is training."""


def synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Clock:
    """Seconds by stage, of the device too. A stage inside another one counts for itself alone."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._inside = [0.0]

    def watch(self, owner: Any, method: str, stage: str, when: Callable[[], bool] = lambda: True) -> None:
        """Have calls of ``owner``'s ``method`` count as ``stage``."""
        plain = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if not when():
                return plain(*args, **kwargs)
            synchronize()
            since = time.perf_counter()
            self._inside.append(0.0)
            try:
                return plain(*args, **kwargs)
            finally:
                synchronize()
                elapsed = time.perf_counter() - since
                self.seconds[f"time/{stage}"] += elapsed - self._inside.pop()
                self._inside[-1] += elapsed

        setattr(owner, method, timed)


def watch(clock: Clock, trainer: Any) -> None:
    import torch

    clock.watch(trainer, "_generate_and_score_completions", "rollout_rest")
    no_grad = lambda: not torch.is_grad_enabled()  # noqa: E731 (with gradient it is the training itself)
    clock.watch(trainer, "_get_per_token_logps_and_entropies", "old_logprobs", no_grad)
    if trainer.use_vllm:
        clock.watch(trainer.vllm_generation, "sync_weights", "weight_sync")
        clock.watch(trainer.vllm_generation.llm, "generate", "generate")
        clock.watch(trainer.vllm_generation.llm, "sleep", "swap")
        clock.watch(trainer.vllm_generation.llm, "wake_up", "swap")


def config_of(setup: SetUp, folder: str) -> Any:
    from trl import GRPOConfig

    on_gpu = setup.shape != "tiny"
    sequences = setup.prompts * setup.members
    micro = min(MICRO_BATCH, sequences)
    engine = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_enable_sleep_mode": True,
        "vllm_gpu_memory_utilization": 0.45,
        "vllm_max_model_length": 1024,
        "generation_kwargs": {"ignore_eos": True},
    }
    return GRPOConfig(
        output_dir=folder,
        max_steps=setup.steps,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=sequences // micro,
        num_generations=setup.members,
        max_completion_length=setup.completion,
        temperature=1.0,
        learning_rate=setup.lr,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        model_init_kwargs={"dtype": "float32"},
        shuffle_dataset=False,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        **(engine if on_gpu else {"use_vllm": False}),
    )


def dataset_of(setup: SetUp) -> Any:
    """Return the prompts as TRL takes them."""
    import datasets.fingerprint

    # Names of cached files, of which there are none; made of what tables hold, which does not work with every pyarrow.
    datasets.fingerprint.Hasher.hash = classmethod(lambda cls, value: uuid.uuid4().hex[:16])
    return datasets.Dataset.from_list([{"prompt": p["prompt"]} for p in prompts_of(setup)[0]])


def device_of(setup: SetUp) -> Any:
    import torch

    return torch.device("cpu" if setup.shape == "tiny" else "cuda:0")


def save_model(setup: SetUp, folder: str) -> None:
    import torch

    on_gpu = device_of(setup).type == "cuda"
    policy = model_of(setup, device_of(setup))
    policy.to(torch.bfloat16 if on_gpu else torch.float32).save_pretrained(folder)  # the engine's type is that on disk
    prompts_of(setup)[1].save_pretrained(folder)


def make_record(setup: SetUp, clock: Clock, sampled: Counter[str], noted: Callable[[Any], None]) -> Any:
    from transformers import TrainerCallback

    steps: list[dict[str, float]] = []

    class Record(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.memory = Memory(device_of(setup))
            self.since = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            synchronize()
            now = time.perf_counter()
            stages = {f"time/{name}": clock.seconds[f"time/{name}"] for name in INSIDE}
            step = {"step": now - self.since, "time/train_step": now - self.since - sum(stages.values())}
            steps.append(step | stages | dict(sampled) | self.memory.now())
            noted(steps)
            clock.seconds.clear()
            sampled.clear()
            self.since = time.perf_counter()

    return Record()


def main(folder: str, changes: str) -> None:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}  # TRL reaches into the engine
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    import torch
    from trl import GRPOTrainer

    setup, clock = SetUp(**json.loads(changes)), Clock()
    sampled: Counter[str] = Counter()

    def rewards(prompts: list[str], completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        sampled["tokens"] += sum(len(ids) for ids in completion_ids)
        sampled["prompt_tokens"] += sum(len(p.split()) for p in prompts)
        return [reward(c) for c in completions]

    with tempfile.TemporaryDirectory() as model:
        save_model(setup, model)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=rewards,
            args=config_of(setup, model),
            train_dataset=dataset_of(setup),
            callbacks=[make_record(setup, clock, sampled, partial(note, Path(folder)))],
        )
        watch(clock, trainer)
        trainer.train()
    sys.stdout.flush()
    os._exit(0)  # all is written down: how its engine ends is not measured


if __name__ == "__main__":
    main(*sys.argv[1:])
