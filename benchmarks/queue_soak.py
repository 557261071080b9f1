"""10,000 rollouts through producer and queue with random delays, lost engines, slow scoring and restarts."""

import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from benchmarks import Result

PROMPTS, EPOCHS, GROUP_SIZE, PROMPTS_PER_STEP = 250, 10, 4, 10
MAX_STALENESS, LOSS, RESTART_EVERY = 2, 0.02, 25
SECONDS = 60


@dataclass
class Seen:
    """What came out, and how full things were."""

    numbers: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    staleness: Counter[int] = field(default_factory=Counter)
    most: Counter[str] = field(default_factory=Counter)
    restarts: int = 0
    losses: int = 0
    sampled: int = 0
    seconds: float = 0.0

    def note(self, **sizes: int) -> None:
        for name, size in sizes.items():
            self.most[name] = max(self.most[name], size)


def make(rng: random.Random) -> tuple[Any, Any]:
    """A pool of coroutines and work for it, both slow at random."""
    import asyncio

    from tests.helpers import pools

    async def sample(request: Any) -> None:
        # Most take a millisecond, some fifty: a batch must not wait for those before it has to.
        await asyncio.sleep(rng.expovariate(1000) if rng.random() < 0.98 else 0.05)

    def score(prompts: Any, completions: Any) -> Any:
        time.sleep(rng.random() * 0.004)
        return pools.score(prompts, completions)

    pool = pools.FakePool(sample, loss=LOSS, seed=rng.randrange(2**31))
    return pool, pools.work(PROMPTS, GROUP_SIZE, score=score)


def stretch(seen: Seen, step: int, steps: int, state: Any, rng: random.Random) -> Any:
    """Train from ``step`` on a new producer that goes on from ``state``; return the state at the end."""
    from lightrl.producer import RolloutProducer
    from lightrl.queue import RolloutQueue
    from tests.helpers.pools import numbers_of

    pool, work = make(rng)
    queue: RolloutQueue[Any] = RolloutQueue(PROMPTS_PER_STEP, MAX_STALENESS, first_step=step)
    producer = RolloutProducer(pool, queue, work, timeout=SECONDS)
    if state:
        work.order.load_state_dict(state["order"])
        producer.restore(state)
    try:
        producer.start()
        for now in range(step, step + steps):
            pool.update(now)
            groups = producer.next_batch().groups
            seen.numbers += numbers_of(groups)
            seen.rows += [g.prompt.index for g in groups]
            seen.staleness.update(now - int(r.policy_versions.min()) for g in groups for r in g.rollouts)
            seen.note(tickets=len(queue.tickets), rows=len(producer.rows), tasks=len(producer._groups))
        state = producer.state_dict()
        seen.note(state=len(state["rows"]))
    finally:
        producer.stop()
        pool.close()
    seen.note(requests=pool.most_pending)
    seen.losses += pool.losses
    seen.sampled += len(pool.sampled)
    return state


def soak(prompts_seen: int) -> tuple[Seen, Any]:
    seen, rng, state = Seen(), random.Random(0), None
    started = time.perf_counter()
    steps = prompts_seen // PROMPTS_PER_STEP
    for step in range(0, steps, RESTART_EVERY):
        state = stretch(seen, step, min(RESTART_EVERY, steps - step), state, rng)
        seen.restarts += 1
    seen.seconds = time.perf_counter() - started
    return seen, state


def faults(seen: Seen, state: Any) -> list[str]:
    """What is not as it must be."""
    from lightrl.prompts import PromptOrder

    found = []
    begun = [number for number, _ in state["rows"]]
    if sorted(seen.numbers + begun) != list(range(state["next_number"])):
        found.append("a prompt was lost or trained on twice")
    order = PromptOrder(PROMPTS, seed=0).take(state["next_number"])
    epochs = {i: order[i : i + PROMPTS] for i in range(0, len(order), PROMPTS)}
    if any(len(set(rows)) != len(rows) for rows in epochs.values()):
        found.append("an epoch has a prompt twice")
    if [order[n] for n in seen.numbers] != seen.rows:
        found.append("a prompt is not the one of its place in the order")
    if max(seen.staleness) > MAX_STALENESS:
        found.append(f"staleness {max(seen.staleness)}")
    groups = (MAX_STALENESS + 1) * PROMPTS_PER_STEP
    bounds = {"tickets": groups, "rows": groups, "tasks": groups, "state": groups, "requests": groups * GROUP_SIZE}
    found += [f"{seen.most[name]} {name}, more than {most}" for name, most in bounds.items() if seen.most[name] > most]
    return found


def judge(seen: Seen, wrong: list[str]) -> Result:
    rollouts = len(seen.numbers) * GROUP_SIZE
    lines = {
        "rollouts trained on": rollouts,
        "rollouts sampled": seen.sampled,
        "engines lost under a request": seen.losses,
        "producers, each from the last one's state": seen.restarts,
        "most groups begun and not trained on": seen.most["rows"],
        "most requests at once": seen.most["requests"],
        "staleness (optimizer steps: rollouts)": dict(sorted(seen.staleness.items())),
        "seconds": f"{seen.seconds:.1f}",
    }
    table = [f"{name:44}{value}" for name, value in lines.items()] + [f"WRONG: {w}" for w in wrong]
    return Result(
        figure=f"{rollouts} rollouts in {seen.seconds:.1f} s, {len(wrong)} faults",
        bar=f"{PROMPTS * EPOCHS * GROUP_SIZE} in < {SECONDS} s, every prompt once per epoch, memory bounded",
        ok=not wrong and seen.seconds < SECONDS and rollouts >= PROMPTS * EPOCHS * GROUP_SIZE,
        table="\n".join(table),
    )


def main() -> Result:
    seen, state = soak(PROMPTS * EPOCHS)
    return judge(seen, faults(seen, state))
