"""What there is of a completion when a checkpoint is written is not sampled again."""

import asyncio
import time
from typing import Any

from lightrl.engines.messages import Output, Request, float_bytes
from lightrl.engines.session import Request as Turn
from lightrl.partial import Parts
from lightrl.rng import derive_seed
from tests.helpers.pools import FakePool, number_of, work
from tests.test_producer import producing


def output(request_id: str, ids: list[int], versions: list[tuple[int, int]], truncated: bool = False) -> Output:
    return Output(request_id, ids, float_bytes([-0.5 * i for i in ids]), versions, truncated)


class Slow(FakePool):
    """Member 1 of each group never ends; of that of ticket 0 two tokens are there."""

    def __init__(self) -> None:
        self.seen: list[Request] = []
        super().__init__(self.wait)

    async def wait(self, request: Request) -> None:
        self.seen.append(request)
        if request.id.split(".")[1] == "1":
            await asyncio.sleep(60)

    async def running(self) -> list[Output]:
        (of_first,) = [r.id for r in self.seen if r.id.startswith("0.1.")]
        return [output(of_first, [7, 8], [(0, 1), (1, 1)])]


def state_of_a_slow_run() -> dict[str, Any]:
    slow = Slow()
    with producing(slow, work(), max_staleness=1) as producer:
        slow.update(0)
        deadline = time.monotonic() + 10
        while len(slow.seen) < 8 or not all(producer.parts.of(n) for n in range(4)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        state: dict[str, Any] = producer.state_dict()
    return state


def test_ended_members_are_kept_and_running_ones_gone_on_from() -> None:
    state = state_of_a_slow_run()
    kept = {(p["number"], p["place"]): p for p in state["parts"]}
    assert {k: p["ended"] for k, p in kept.items()} == {
        (0, 0): True,
        (0, 1): False,
        **{(n, 0): True for n in (1, 2, 3)},
    }
    assert kept[0, 1]["token_ids"] == [7, 8]
    asked: list[Request] = []

    async def note(request: Request) -> None:
        asked.append(request)

    pool, again = FakePool(note), work()
    pool.current = 1
    row = dict(state["rows"])[0]
    with producing(pool, again, state, max_staleness=1) as producer:
        groups = [*producer.next_batch().groups, *producer.next_batch().groups]
    wanted = [r for r in asked if number_of(r) < 4]
    assert sorted(r.id[:3] for r in wanted) == ["0.1", "1.1", "2.1", "3.1"]
    (rest,) = [r for r in wanted if r.id.startswith("0.1")]
    assert (rest.prompt, rest.max_tokens) == ([row, 7, 8], 2)
    (first,) = [g for g in groups if g.prompt.index == row]
    assert first.rollouts[1].completion_ids == [7, 8, row, 0]
    assert first.rollouts[1].policy_versions.tolist() == [0, 1, 1, 1]
    assert first.rollouts[1].rollout_logprobs.tolist() == [-3.5, -4.0, -1.0, -2.0]


def test_what_is_too_old_for_every_batch_is_sampled_again() -> None:
    state, asked = state_of_a_slow_run(), []

    async def note(request: Request) -> None:
        asked.append(request.id[:3])

    pool = FakePool(note)
    pool.current = 3
    with producing(pool, work(), state, max_staleness=1, first_step=3) as producer:
        producer.next_batch()
    assert {"0.0", "0.1", "1.0", "1.1"} <= set(asked)


def test_a_completion_that_goes_on_draws_by_another_seed() -> None:
    parts = Parts()
    parts.add(output("5.0.9", [4], [(2, 1)]), ended=False)
    parts.add(output("5.1.9", [4, 6], [(2, 2)]), ended=True)
    turns = [Turn(i, [3], 6, 11) for i in range(3)]
    first, third = parts.rest(5, turns)
    assert (first.key, first.prompt_ids, first.max_tokens, first.seed) == (0, [3, 4], 5, derive_seed(11, 1))
    assert third == turns[2]
    assert parts.oldest(5) == 2
    assert parts.oldest(6) is None


def test_a_part_that_fills_a_smaller_budget_is_sampled_anew() -> None:
    parts = Parts()
    parts.add(output("3.0.0", [7, 8], [(0, 2)]), ended=False)
    whole = Turn(0, [5], 2, 1)
    assert parts.rest(3, [whole]) == [whole]
    assert parts.of(3) == {}
