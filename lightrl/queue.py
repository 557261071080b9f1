"""Which rollouts may be begun, and which are trained on next: staleness held by pacing, nothing lost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from lightrl.arguments import check_at_least_one, check_count

T = TypeVar("T")


@dataclass(slots=True)
class Ticket(Generic[T]):
    """A prompt on its way: from the moment it is begun until its group is trained on."""

    number: int
    """0, 1, 2, ... in the order of prompts."""
    version: int
    """Optimizer steps done by the oldest weights that may have sampled any of its tokens."""
    group: T | None = None
    """What came of it; None until it is ready, or where its place stays empty."""
    ready: bool = False


@dataclass(slots=True)
class RolloutQueue(Generic[T]):
    """Paces prompts so that no group is trained on with weights more than ``max_staleness`` optimizer steps old.

    Batch ``c`` is first used at optimizer step ``first_step + c * steps_per_rollout``. A prompt begun under version v
    is good for batches up to ``(v + max_staleness - first_step) // steps_per_rollout``, its deadline, and prompts are
    begun only while fewer than ``prompts_per_step`` were for each batch up to that one. A batch takes the ready groups
    whose deadlines come first, and waits only while taking others would leave more groups up to some deadline than the
    batches until then can hold. So stragglers stop nobody before they must, and no group comes too late. It is plain
    data: no thread, no clock.

    Args:
        prompts_per_step: groups in a batch.
        max_staleness: optimizer steps between sampling and first use; 0 is synchronous.
        steps_per_rollout: optimizer steps that each batch is used for.
        first_step: the optimizer step at which the next batch is used.
        max_in_flight: groups that may be begun and not ready; None: as many as pacing allows.
        oversample: begin this many times the groups that a batch needs, and let the slowest go: see :meth:`take`.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> queue = RolloutQueue(prompts_per_step=2, max_staleness=0)
        >>> a, b = queue.begin(version=0), queue.begin(version=0)
        >>> queue.may_begin(version=0), queue.take()  # the batch is not ready
        (False, None)
        >>> queue.finish(b, "b"), queue.finish(a, "a"), queue.take()
        (None, None, ['a', 'b'])
    """

    prompts_per_step: int
    max_staleness: int = 0
    steps_per_rollout: int = 1
    first_step: int = 0
    max_in_flight: int | None = None
    oversample: float = 1.0
    batches: int = 0
    """Batches taken."""
    begun: int = 0
    """Tickets given out and not taken back."""
    next_number: int = 0
    tickets: dict[int, Ticket[T]] = field(default_factory=dict)
    """Those that are not trained on yet, by number."""
    again: list[int] = field(default_factory=list)
    """Numbers of tickets that were let go, to be begun again first."""

    def __post_init__(self) -> None:
        check_at_least_one(prompts_per_step=self.prompts_per_step, steps_per_rollout=self.steps_per_rollout)
        check_count("max_staleness", self.max_staleness)
        check_at_least_one(max_in_flight=self.max_in_flight)
        if self.max_in_flight is not None and self.max_in_flight < self.prompts_per_step:
            raise ValueError(
                f"max_in_flight={self.max_in_flight} is less than the prompts_per_step={self.prompts_per_step} groups "
                "that a batch needs"
            )
        if not self.oversample >= 1:
            raise ValueError(f"oversample={self.oversample} must be 1 or more")

    def deadline(self, version: int) -> int:
        """The last batch in which a group begun under ``version`` may be."""
        return (version + self.max_staleness - self.first_step) // self.steps_per_rollout

    def may_begin(self, version: int) -> bool:
        """Whether another prompt may be begun under ``version``."""
        in_flight = sum(not t.ready for t in self.tickets.values())
        if self.max_in_flight is not None and in_flight >= self.max_in_flight:
            return False
        if self.deadline(version) < self.batches:
            return False  # too late for the next batch: that of another version is to be waited for
        extra = round(self.prompts_per_step * (self.oversample - 1))
        last = self.deadline(version)
        return last >= self.batches and self.begun < (last + 1) * self.prompts_per_step + extra

    def begin(self, version: int) -> Ticket[T]:
        """Give out the ticket of the next prompt."""
        if self.again:
            number = self.again.pop(0)
        else:
            number = self.next_number
            self.next_number += 1
        ticket: Ticket[T] = Ticket(number, version)
        self.tickets[number] = ticket
        self.begun += 1
        return ticket

    def finish(self, ticket: Ticket[T], group: T | None) -> None:
        """Its group is complete; None leaves its place in the batch empty."""
        ticket.group, ticket.ready = group, True

    def give_back(self, ticket: Ticket[T], *, again: bool) -> None:
        """Take a ticket out: its prompt is begun ``again``, or another one in its place."""
        del self.tickets[ticket.number]
        self.begun -= 1
        if again:
            self.again.append(ticket.number)
            self.again.sort()

    def overdue(self) -> list[Ticket[T]]:
        """Tickets that came too late for every batch still to come."""
        return [t for t in self.tickets.values() if self.deadline(t.version) < self.batches]

    def take(self) -> list[T] | None:
        """Return the groups of the next batch by number, or None while it has to wait.

        With ``oversample`` above 1 a batch does not wait for groups with early deadlines once enough others are ready.
        What is left behind is :meth:`overdue`, to be given back and sampled again. That favours prompts whose
        completions are short, so batches are biased towards them.
        """
        ready = [t for t in self.tickets.values() if t.ready]
        if len(ready) < self.prompts_per_step:
            return None
        ready.sort(key=lambda t: (self.deadline(t.version), t.number))
        chosen = sorted(ready[: self.prompts_per_step], key=lambda t: t.number)
        if self.oversample == 1 and not self._in_time({t.number for t in chosen}):
            return None
        for ticket in chosen:
            del self.tickets[ticket.number]
        self.batches += 1
        return [t.group for t in chosen if t.group is not None]

    def _in_time(self, chosen: set[int]) -> bool:
        """Whether the batches after this one can hold all that it leaves, each group by its deadline."""
        left = sorted(self.deadline(t.version) for t in self.tickets.values() if t.number not in chosen)
        return all(i < (last - self.batches) * self.prompts_per_step for i, last in enumerate(left))
