"""Batches that leave nothing to come too late, and nothing begun that is too late already."""

import random

import pytest

from lightrl.queue import RolloutQueue, Ticket


def begin_all(queue: RolloutQueue[int], version: int) -> list[Ticket[int]]:
    found = []
    while queue.may_begin(version):
        found.append(queue.begin(version))
    return found


def finish(queue: RolloutQueue[int], *tickets: Ticket[int]) -> None:
    for ticket in tickets:
        queue.finish(ticket, ticket.number)


def test_newer_groups_wait_where_older_ones_would_come_too_late() -> None:
    queue: RolloutQueue[int] = RolloutQueue(prompts_per_step=2, max_staleness=2)
    first = begin_all(queue, 0)
    assert len(first) == 6
    finish(queue, *first[:2])
    assert queue.take() == [0, 1]
    finish(queue, *begin_all(queue, 1))
    assert queue.take() is None  # with 6 and 7 in it, 2 to 5 would all have to be in the next
    finish(queue, first[2])
    assert queue.take() is None
    finish(queue, first[4])
    assert queue.take() == [2, 4]
    finish(queue, first[3], first[5])
    assert queue.take() == [3, 5]
    assert queue.overdue() == []


@pytest.mark.parametrize("seed", range(60))
def test_no_group_is_begun_in_vain(seed: int) -> None:
    """Whatever ends first: no batch is too old, none is short, and no finished group has to be sampled again."""
    g = random.Random(seed)
    prompts, staleness, steps = g.randint(1, 4), g.randint(0, 5), g.choice([1, 2, 4])
    queue: RolloutQueue[int] = RolloutQueue(prompts, staleness, steps)
    running: list[Ticket[int]] = []
    for batch in range(30):
        running += begin_all(queue, batch * steps)
        while (groups := queue.take()) is None:
            ticket = running.pop(g.randrange(len(running)))
            queue.finish(ticket, ticket.version)
        assert len(groups) == prompts
        assert batch * steps - min(groups) <= staleness
        assert queue.overdue() == []


def test_oversampling_begins_nothing_under_weights_that_are_too_old() -> None:
    queue: RolloutQueue[int] = RolloutQueue(prompts_per_step=2, max_staleness=0, oversample=1.5)
    *fast, slow = begin_all(queue, 0)
    finish(queue, *fast)
    assert queue.take() == [0, 1]
    assert queue.overdue() == [slow]
    queue.give_back(slow, again=True)
    assert not queue.may_begin(0)  # the next batch is for weights of version 1
    assert [t.number for t in begin_all(queue, 1)] == [2, 3, 4]
