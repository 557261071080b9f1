"""Generation and training of equal length, in turns and at the same time: seconds a step."""

import time
from typing import Any

from benchmarks import Result
from benchmarks._slow_engine import slow_engine

needs = "vllm"

STEPS, DROPPED = 14, 4
TOKEN_SECONDS, TRAIN_SECONDS = 0.006, 1.0
BAR = 1.15


def fit(strategy: Any) -> tuple[list[float], dict[str, float]]:
    """Seconds of each step, and the mean of the stages' seconds."""
    import torch
    from lightning.pytorch import Callback

    from lightrl.corrections import TruncatedToken
    from tests.helpers.fits import quiet_trainer, tiny_data
    from tests.helpers.tiny import tiny_model, tiny_prompts

    class Clock(Callback):
        def __init__(self) -> None:
            self.ends: list[float] = []
            self.stages: list[dict[str, float]] = []

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            self.ends.append(time.perf_counter())
            self.stages.append({k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("time/")})

    from lightrl import RLModule

    class Slow(RLModule):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            time.sleep(TRAIN_SECONDS)
            return super().training_step(batch, batch_idx)

    clock = Clock()
    data = tiny_data(tiny_prompts(4 * STEPS), group_size=8, max_completion_tokens=6, deterministic=True)
    module = Slow(tiny_model(), lr=0.0, correction=TruncatedToken())
    quiet_trainer(strategy, callbacks=[clock], max_steps=STEPS).fit(module, data)
    steps = [b - a for a, b in zip(clock.ends, clock.ends[1:], strict=False)][DROPPED - 1 :]
    stages = clock.stages[DROPPED:]
    return steps, {
        name: sum(s[name] for s in stages) / len(stages) for name in stages[0] if all(name in s for s in stages)
    }


def colocated() -> tuple[list[float], dict[str, float]]:
    from lightrl.strategies import ColocatedVLLMStrategy

    class Slow(ColocatedVLLMStrategy):
        def generate(self, prompts: Any, sampling: Any) -> Any:
            groups = super().generate(prompts, sampling)
            seconds = TOKEN_SECONDS * sum(len(c.token_ids) for group in groups for c in group)
            time.sleep(seconds)
            self.seconds["time/generate"] += seconds
            return groups

    return fit(Slow())


def ahead() -> tuple[list[float], dict[str, float]]:
    from lightrl.strategies import AsyncVLLMStrategy

    with slow_engine(0.0, TOKEN_SECONDS) as address:
        return fit(AsyncVLLMStrategy(max_staleness=2, pool=[address]))


def judge(turns: list[float], together: list[float], generate: float, train: float) -> Result:
    longer, ours = max(generate, train), sum(together) / len(together)
    theirs = sum(turns) / len(turns)
    table = [
        f"{'seconds':34}",
        f"{'generate (G), train (U)':34}{generate:.2f}, {train:.2f}",
        f"{'a step in turns (colocated)':34}{theirs:.2f} = {theirs / longer:.2f} x max(G, U)",
        f"{'a step at the same time (async)':34}{ours:.2f} = {ours / longer:.2f} x max(G, U)",
    ]
    return Result(
        figure=f"{ours / longer:.2f} x max(G, U), in turns {theirs / longer:.2f} x",
        bar=f"<= {BAR} x",
        ok=ours <= BAR * longer,
        table="\n".join(table),
    )


def main() -> Result:
    turns, stages = colocated()
    together, _ = ahead()
    return judge(turns, together, stages["time/generate"], stages["time/train_step"])
