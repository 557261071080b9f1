"""`lightrl plan`'s bound against measured runs, in turns and asynchronous, with completions of very unequal length."""

import time
from dataclasses import dataclass
from typing import Any

from benchmarks import Result
from benchmarks._slow_engine import slow_engine

needs = "vllm"

PROMPTS, GROUP, LONGEST = 4, 4, 40
STOPS = [2, 9, 16, 23]
"""Of 32 words: a completion has 8 tokens on average, and the longest of 16 about 27."""
STEPS, DROPPED = 28, 10
"""All that may be under way begins at once: some steps pass until completions end evenly."""
MAX_STALENESS = 2
SLACK, TIGHT = 1.05, 1.35
"""A measured run may be 5 % faster than its bound, for noise, and 35 % slower, or the bound says little."""


@dataclass(frozen=True)
class Costs:
    """Seconds that are slept, far above what the tiny model takes."""

    fixed: float
    """Of each decode step of an engine."""
    per_sequence: float
    """Of each sequence in it."""
    train: float
    """Of training on two devices."""


COSTS = {
    "generation is work, and nearly all there is": Costs(fixed=0.005, per_sequence=0.02, train=0.1),
    "generation waits for its longest completion": Costs(fixed=0.06, per_sequence=0.006, train=0.9),
}


@dataclass(frozen=True)
class Measured:
    """Mean seconds of a step, and of its stages."""

    step: float
    stages: dict[str, float]


def fit(strategy: Any, train_seconds: float, prompts: int = PROMPTS) -> Measured:
    from lightning.pytorch import Callback

    from lightrl import RLModule
    from lightrl.cli.measure import StageClock
    from lightrl.corrections import TruncatedToken
    from tests.helpers.fits import quiet_trainer, tiny_data
    from tests.helpers.tiny import tiny_model, tiny_prompts

    class Slow(RLModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            time.sleep(train_seconds)
            return super().training_step(batch, batch_idx)

    class Ends(Callback):
        def __init__(self) -> None:
            self.at: list[float] = []

        def on_train_batch_end(self, *_: Any) -> None:
            self.at.append(time.perf_counter())

    ends, clock = Ends(), StageClock(STEPS)
    data = tiny_data(
        tiny_prompts(4 * STEPS),
        group_size=GROUP,
        prompts_per_step=prompts,
        max_completion_tokens=LONGEST,
        deterministic=True,
    )
    model = tiny_model()
    model.generation_config.eos_token_id = STOPS
    module = Slow(model, lr=0.0, correction=TruncatedToken())
    quiet_trainer(strategy, callbacks=[clock, ends], max_epochs=-1).fit(module, data)
    seconds = (ends.at[-1] - ends.at[DROPPED - 1]) / (len(ends.at) - DROPPED)
    batches = clock.batches[DROPPED:]
    return Measured(seconds, {stage: sum(b[stage] for b in batches) / len(batches) for stage in batches[0]})


def in_turns(costs: Costs, prompts: int = PROMPTS) -> Measured:
    """As two devices would that generate half of the sequences each."""
    from lightrl.strategies import ColocatedVLLMStrategy

    class Slow(ColocatedVLLMStrategy):
        def generate(self, prompts: Any, sampling: Any) -> Any:
            groups = super().generate(prompts, sampling)
            lengths = [len(c.token_ids) for group in groups for c in group]
            seconds = costs.fixed * max(lengths) + costs.per_sequence * sum(lengths) / 2
            time.sleep(seconds)
            # What the tiny model takes besides is this machine's: two devices would not share it as they do their work.
            self.seconds["time/generate"] = seconds
            return groups

    return fit(Slow(), costs.train, prompts)


def asynchronous(costs: Costs) -> Measured:
    """One device generates, and one trains on all of it."""
    from lightrl.strategies import AsyncVLLMStrategy

    with slow_engine(costs.fixed, costs.per_sequence) as address:
        return fit(AsyncVLLMStrategy(max_staleness=MAX_STALENESS, pool=[address]), 2 * costs.train)


def compare(name: str) -> dict[str, Any]:
    from lightrl.cli.measure import step_of
    from lightrl.planning import make_plan

    costs = COSTS[name]
    turns, half = in_turns(costs), in_turns(costs, PROMPTS // 2)
    plan = make_plan(step_of(turns.stages, half.stages), devices=2, max_staleness=MAX_STALENESS)
    return {"name": name, "plan": plan, "turns": turns.step, "asynchronous": asynchronous(costs).step}


def judge(rows: list[dict[str, Any]]) -> Result:
    table, ratios, right = [], [], []
    for row in rows:
        plan, turns, found = row["plan"], row["turns"], row["asynchronous"]
        ratios.append(found / min(plan.splits))
        right.append((plan.gain > 1) == (found < turns) or abs(found / turns - 1) < SLACK - 1)
        table += [
            f"-- {row['name']} --",
            plan.table(),
            f"measured: in turns {turns:.2f} s, asynchronous {found:.2f} s = {ratios[-1]:.2f} x its bound, "
            f"{turns / found:.2f} times as fast",
            "",
        ]
    return Result(
        figure=f"measured {' and '.join(f'{r:.2f}' for r in ratios)} x the bound, "
        f"{sum(right)} of {len(right)} verdicts right",
        bar=f"from {1 / SLACK:.2f} x to {TIGHT} x, all right",
        ok=all(1 / SLACK <= r <= TIGHT for r in ratios) and all(right),
        table="\n".join(table).rstrip(),
    )


def main() -> Result:
    return judge([compare(name) for name in COSTS])
