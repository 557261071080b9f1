"""The rollout queue on its own: what it promises holds whatever order things happen in."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lightrl.queue import RolloutQueue, Ticket


class Pacing(RuleBasedStateMachine):
    """Engines, scorer and trainer do whatever they may in any order; a group is the number of its ticket."""

    @initialize(
        prompts_per_step=st.integers(1, 4),
        max_staleness=st.integers(0, 4),
        steps_per_rollout=st.integers(1, 3),
        first_step=st.integers(0, 5),
        spare=st.none() | st.integers(0, 4),
        oversample=st.sampled_from([1.0, 1.0, 1.5, 2.0]),
    )
    def build(
        self,
        prompts_per_step: int,
        max_staleness: int,
        steps_per_rollout: int,
        first_step: int,
        spare: int | None,
        oversample: float,
    ) -> None:
        cap = None if spare is None else prompts_per_step + spare
        self.queue: RolloutQueue[int] = RolloutQueue(
            prompts_per_step, max_staleness, steps_per_rollout, first_step, cap, oversample
        )
        self.version = self.step = first_step  # of the engines; of the trainer, which is ahead until it pushes
        self.used = first_step  # optimizer steps up to the end of the batch that is trained on
        self.running: dict[int, Ticket[int]] = {}
        self.given_up = 0
        self.trained: list[int] = []
        self.begun_at: dict[int, int] = {}

    # -- what may happen ----------------------------------------------------------------------------------------------

    @precondition(lambda self: self.queue.may_begin(self.version))
    @rule()
    def begin(self) -> None:
        expected = min(self.queue.again, default=self.queue.next_number)
        ticket = self.queue.begin(self.version)
        assert ticket.number == expected
        assert ticket.number not in self.running
        assert ticket.number not in self.trained
        self.running[ticket.number] = ticket
        self.begun_at[ticket.number] = self.version

    @precondition(lambda self: self.running)
    @rule(data=st.data(), refused=st.sampled_from([False, False, True]))
    def finish(self, data: Any, refused: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.running)))
        ticket = self.running.pop(number)
        if refused:  # another prompt takes its place
            self.queue.give_back(ticket, again=False)
            self.given_up += 1
        else:
            self.queue.finish(ticket, number)

    @precondition(lambda self: len(self.running) > 1)
    @rule()
    def finish_all_but_the_oldest(self) -> None:
        for number in sorted(self.running)[1:]:
            self.queue.finish(self.running.pop(number), number)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def lose(self, data: Any) -> None:
        number = data.draw(st.sampled_from(sorted(self.running)))
        self.queue.give_back(self.running.pop(number), again=True)

    @precondition(lambda self: self.step < self.used)
    @rule()
    def train(self) -> None:
        self.step += 1

    @rule()
    def push(self) -> None:
        self.version = self.step

    @rule(at_once=st.booleans())
    def take(self, at_once: bool) -> None:
        self.step = self.used  # it is asked for when the last one is used up
        batch = self.queue.take()
        if batch is None:
            return
        self._check(batch)
        for ticket in self.queue.overdue():
            assert self.queue.oversample > 1
            self.queue.give_back(ticket, again=True)
            self.running.pop(ticket.number, None)
        if at_once:
            self.step = self.version = self.used

    def _check(self, batch: list[int]) -> None:
        assert len(batch) == self.queue.prompts_per_step
        assert batch == sorted(batch)
        assert not set(batch) & set(self.trained)
        oldest = min(self.begun_at[n] for n in batch)
        assert self.step - oldest <= self.queue.max_staleness
        self.trained += batch
        self.used += self.queue.steps_per_rollout

    # -- what must hold -----------------------------------------------------------------------------------------------

    @invariant()
    def at_most_a_batch_is_at_its_deadline(self) -> None:
        queue = self.queue
        if queue.oversample == 1:
            due = [t for t in queue.tickets.values() if queue.deadline(t.version) <= queue.batches]
            assert len(due) <= queue.prompts_per_step
            assert not queue.overdue()

    @invariant()
    def memory_is_bounded(self) -> None:
        queue = self.queue
        ahead = 1 + queue.max_staleness // queue.steps_per_rollout
        most = ahead * queue.prompts_per_step + round(queue.prompts_per_step * (queue.oversample - 1))
        assert len(queue.tickets) <= most
        if queue.max_in_flight is not None:
            assert len(self.running) <= queue.max_in_flight
        assert len(queue.again) <= most + queue.max_staleness + 2 * queue.prompts_per_step

    @invariant()
    def every_number_is_in_one_place(self) -> None:
        queue = self.queue
        places = [*queue.tickets, *queue.again, *self.trained]
        assert len(places) == len(set(places)) == queue.next_number - self.given_up
        assert set(self.running) == {n for n, t in queue.tickets.items() if not t.ready}

    def teardown(self) -> None:
        """No deadlock: from wherever this ended, engines that go on and pushes that arrive bring the next batches."""
        if not hasattr(self, "queue"):
            return
        for _ in range(3):
            self.step = self.version = self.used
            while self.queue.may_begin(self.version):
                ticket = self.queue.begin(self.version)
                self.running[ticket.number], self.begun_at[ticket.number] = ticket, self.version
                if self.queue.max_in_flight is not None:  # no room is made before something ends
                    self.queue.finish(self.running.pop(ticket.number), ticket.number)
            for number, ticket in self.running.items():
                self.queue.finish(ticket, number)
            self.running.clear()
            batch = self.queue.take()
            assert batch is not None
            self._check(batch)
            for ticket in self.queue.overdue():
                self.queue.give_back(ticket, again=True)


TestPacing = Pacing.TestCase
TestPacing.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)


# -- cases -------------------------------------------------------------------------------------------------------------


def run(limit: int, *, slow: str, steps: int = 5, prompts_per_step: int = 3) -> tuple[list[int], int]:
    """Return the ages of what was trained on, and the most groups in flight or waiting at once."""
    queue: RolloutQueue[int] = RolloutQueue(prompts_per_step, limit)
    ages, most, running = [], 0, []
    for step in range(steps):
        for _ in range(100):  # a slow trainer lets engines do all they may, slow engines one group at a time
            while queue.may_begin(step):
                running.append(queue.begin(step))
            most = max(most, len(queue.tickets))
            for ticket in running[: None if slow == "trainer" else 1]:
                queue.finish(ticket, ticket.version)
                running.remove(ticket)
            batch = queue.take()
            if batch is not None:
                break
        else:
            pytest.fail(f"step {step} waits for ever")
        ages += [step - version for version in batch]
    return ages, most


@pytest.mark.parametrize("slow", ["trainer", "engines"])
@pytest.mark.parametrize("limit", [0, 1, 2])
def test_b40_a_staleness_limit_admits_ages_up_to_it_and_never_more(limit: int, slow: str) -> None:
    ages, most = run(limit, slow=slow)
    assert len(ages) == 5 * 3
    assert max(ages) <= limit
    assert min(ages) >= 0
    assert most <= (limit + 1) * 3
    if slow == "trainer":  # what may be done ahead is done ahead
        assert max(ages) == limit
        assert most == (limit + 1) * 3


def test_b40_a_limit_of_0_is_synchronous() -> None:
    ages, _ = run(0, slow="engines")
    assert set(ages) == {0}


def test_b40_a_limit_of_minus_1_is_an_error() -> None:
    with pytest.raises(ValueError, match="max_staleness=-1 must be 0 or more"):
        RolloutQueue(4, -1)


def test_b40_an_age_counts_each_update_of_the_weights_once() -> None:
    queue: RolloutQueue[str] = RolloutQueue(1, max_staleness=3)
    for number in range(4):
        queue.finish(queue.begin(0), str(number))
    assert not queue.may_begin(0)
    assert [queue.take() for _ in range(4)] == [["0"], ["1"], ["2"], ["3"]]  # at steps 0, 1, 2, 3: ages up to 3
    assert queue.take() is None
    assert not queue.may_begin(0)  # it would be 4 steps old at step 4
    assert queue.may_begin(1)


def test_a_straggler_does_not_hold_up_what_is_ready_until_its_deadline() -> None:
    queue: RolloutQueue[int] = RolloutQueue(2, max_staleness=1)
    tickets = [queue.begin(0) for _ in range(4)]
    for ticket in tickets[1:]:
        queue.finish(ticket, ticket.number)
    assert queue.take() == [1, 2]
    assert queue.may_begin(1)
    queue.finish(queue.begin(1), 4)
    assert queue.take() is None  # step 1 is the last for number 0: it is waited for
    queue.finish(tickets[0], 0)
    assert queue.take() == [0, 3]


def test_oversampling_takes_the_first_to_end_and_begins_the_others_again() -> None:
    queue: RolloutQueue[int] = RolloutQueue(4, oversample=1.5)
    tickets = []
    while queue.may_begin(0):
        tickets.append(queue.begin(0))
    assert len(tickets) == 6
    for ticket in (tickets[5], tickets[0], tickets[4], tickets[2]):
        queue.finish(ticket, ticket.number)
    assert queue.take() == [0, 2, 4, 5]
    late = queue.overdue()
    assert [t.number for t in late] == [1, 3]
    for ticket in reversed(late):
        queue.give_back(ticket, again=True)
    assert [queue.begin(1).number for _ in range(3)] == [1, 3, 6]


def test_oversampling_begins_nothing_under_weights_that_are_too_old_for_the_next_batch() -> None:
    queue: RolloutQueue[int] = RolloutQueue(2, oversample=2.0)
    tickets = [queue.begin(0) for _ in range(4)]
    for ticket in tickets[:2]:
        queue.finish(ticket, ticket.number)
    assert queue.take() == [0, 1]
    for ticket in queue.overdue():
        queue.give_back(ticket, again=True)
    assert not queue.may_begin(0)  # there are places, but the next step is step 1
    assert queue.may_begin(1)


def test_an_empty_place_is_left_out_of_its_batch() -> None:
    queue: RolloutQueue[str] = RolloutQueue(2)
    a, b = queue.begin(0), queue.begin(0)
    queue.finish(a, None)
    queue.finish(b, "b")
    assert queue.take() == ["b"]


def test_a_cap_on_groups_in_flight_counts_those_that_are_not_ready() -> None:
    queue: RolloutQueue[str] = RolloutQueue(2, max_staleness=3, max_in_flight=2)
    a, _ = queue.begin(0), queue.begin(0)
    assert not queue.may_begin(0)
    queue.finish(a, "a")
    assert queue.may_begin(0)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"prompts_per_step": 0}, "prompts_per_step=0 must be at least 1"),
        ({"prompts_per_step": "8"}, "prompts_per_step='8' must be a whole number"),
        ({"prompts_per_step": True}, "prompts_per_step=True must be a whole number"),
        ({"max_in_flight": 8.5}, "max_in_flight=8.5 must be a whole number"),
        ({"steps_per_rollout": 0}, "steps_per_rollout=0 must be at least 1"),
        ({"max_in_flight": 3}, "max_in_flight=3 is less than the prompts_per_step=4"),
        ({"oversample": 0.5}, "oversample=0.5 must be 1 or more"),
        ({"oversample": float("nan")}, "oversample=nan must be 1 or more"),
    ],
)
def test_bad_arguments_are_named(args: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RolloutQueue(**{"prompts_per_step": 4} | args)
