"""Taking turns or asynchronous: the least time that a step can take either way, from a few measured seconds.

The cost of generation is taken to be linear: a decode step costs an engine a fixed time (weights are read, whatever the
number of sequences) and a time for each sequence in it. So of the seconds G that N devices generate for in turns, a
share f, that of the fixed times, lasts as long as the longest completion, on any number of devices, and the rest is
work that devices share.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightrl.arguments import check_count


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Where the seconds of a step go when all devices take turns.

    Example:
        Eight devices, 8 s of generation, half of it fixed, 10 s of training. With 3 devices that generate: their work
        is 4 x 8 / 3 = 10.7 s, and at max_staleness=1 the longest completion adds 4 / 2 s; training takes
        10 x 8 / 5 = 16 s, which is the longer.

        >>> step = StepSeconds(generate=8, train=10, fixed_share=0.5)
        >>> step.in_turns, step.asynchronous(devices=8, generating=3, max_staleness=1)
        (18.0, 16.0)
    """

    generate: float
    train: float
    """Forward, backward and update, with whatever scoring precedes them."""
    reward: float = 0.0
    sync: float = 0.0
    swap: float = 0.0
    """Memory that changes hands between generation and training; asynchronous runs have none of it."""
    fixed_share: float = 0.0
    """Share of ``generate`` that a decode step costs whatever the number of sequences: 0 where throughput is all, 1
    where latency is."""

    def __post_init__(self) -> None:
        """Refuse what is no time.

        Raises:
            ValueError: a value is negative, ``fixed_share`` is above 1, or there is no generation or no training.
        """
        for name in ("generate", "train", "reward", "sync", "swap", "fixed_share"):
            value = getattr(self, name)
            if not 0 <= value < float("inf") or (name == "fixed_share" and value > 1):
                raise ValueError(f"{name}={value} must be a number of seconds, 0 or more (fixed_share: from 0 to 1)")
        if not self.generate or not self.train:
            raise ValueError(f"generate={self.generate}, train={self.train}: both must be above 0")

    @property
    def in_turns(self) -> float:
        """Seconds of a step when the devices take turns."""
        return float(self.generate + self.reward + self.sync + self.swap + self.train)

    def asynchronous(self, devices: int, generating: int, max_staleness: int) -> float:
        """Return the least seconds of an asynchronous step: no run is faster, if the costs are as they are said to be.

        The longest of four: training and push on the devices that train; rewards; the engines' work, and the decode
        steps of the longest completion, which is in flight for at most ``max_staleness + 1`` steps; and the way of that
        completion from the push before it to the end of the step that trains on it, over as many steps.

        Args:
            devices: as many as measured in turns.
            generating: how many of them generate, from 1 to ``devices - 1``.
            max_staleness: optimizer steps; see :class:`lightrl.strategies.AsyncVLLMStrategy`.
        """
        fixed = self.fixed_share * self.generate
        work = (self.generate - fixed) * devices / generating
        train = self.train * devices / (devices - generating) + self.sync
        way = fixed + work + self.reward + train
        return max(train, self.reward, work + fixed / (max_staleness + 1), way / (max_staleness + 1))


@dataclass(frozen=True, slots=True)
class Plan:
    """Which way is faster, and by how much at most."""

    step: StepSeconds
    devices: int
    max_staleness: int
    splits: tuple[float, ...]
    """Least seconds of an asynchronous step with 1, 2, ... generating devices."""

    @property
    def generating(self) -> int:
        """Devices that generate in the fastest split; the fewest where several are alike."""
        return self.splits.index(min(self.splits)) + 1

    @property
    def gain(self) -> float:
        """How many times as fast as in turns an asynchronous run is at most."""
        return self.step.in_turns / min(self.splits)

    def table(self) -> str:
        """Return what a person wants to see."""
        s, n = self.step, self.devices
        lines = [
            f"{'seconds of a step in turns':44}{s.in_turns:8.2f}",
            f"  generate {s.generate:.2f} ({s.fixed_share:.0%} of it fixed), reward {s.reward:.2f}, sync {s.sync:.2f}, "
            f"swap {s.swap:.2f}, train {s.train:.2f}",
            f"{f'asynchronous at max_staleness={self.max_staleness}, at least':44}",
        ]
        for generating, seconds in enumerate(self.splits, 1):
            mark = "  <- best" if generating == self.generating else ""
            lines.append(f"{f'  {generating} generate, {n - generating} train':44}{seconds:8.2f}{mark}")
        return "\n".join([*lines, self.verdict()])

    def verdict(self) -> str:
        """Return the answer in one line."""
        if abs(self.gain - 1.0) < 0.005:
            return "take turns: an asynchronous run would be no faster"
        if self.gain < 1.0:
            return f"take turns: an asynchronous run would be slower ({1 / self.gain:.2f} times as long at least)"
        split = f"{self.generating} generating and {self.devices - self.generating} training"
        return f"asynchronous may be faster, {self.gain:.2f} times at most, with {split} devices"


def make_plan(step: StepSeconds, devices: int, max_staleness: int = 1) -> Plan:
    """Compare both ways on ``devices`` devices.

    Raises:
        ValueError: see :func:`check_plannable`.
    """
    check_plannable(devices, max_staleness)
    splits = tuple(step.asynchronous(devices, n, max_staleness) for n in range(1, devices))
    return Plan(step, devices, max_staleness, splits)


def check_plannable(devices: int, max_staleness: int) -> None:
    """Refuse what no plan can be made for.

    Raises:
        ValueError: there are fewer than two devices, or ``max_staleness`` is negative.
    """
    if devices < 2:
        raise ValueError(
            f"devices={devices}: an asynchronous run needs at least two, one that generates, one that trains"
        )
    check_count("max_staleness", max_staleness)


def with_fixed_share(
    step: StepSeconds, generate_half: float, tokens: tuple[float, float], longest: tuple[float, float]
) -> StepSeconds:
    """Return ``step`` with the share that is fixed, from what generation took for half as many prompts.

    Fewer completions have a shorter longest one: a decode step's fixed seconds and a token's are what solves
    ``seconds = fixed * longest + each * tokens`` for both.

    Args:
        step: of all prompts.
        generate_half: seconds of generation for half of them.
        tokens: of all completions, of all prompts and of half of them.
        longest: tokens of the longest completion, of all prompts and of half of them.

    Raises:
        ValueError: the lengths do not tell the two costs apart.

    Example:
        Half the prompts save 2 s, so the work is 4 s and the other 4 s are fixed.

        >>> step = StepSeconds(generate=8, train=1)
        >>> with_fixed_share(step, 6, tokens=(800, 400), longest=(90, 90)).fixed_share
        0.5
    """
    apart = longest[1] * tokens[0] - longest[0] * tokens[1]
    if apart <= 0:
        raise ValueError(
            f"all prompts have {tokens[0]} tokens, the longest completion {longest[0]}, half of them {tokens[1]} and "
            f"{longest[1]}: nothing tells a decode step's cost from a token's. Measure more batches"
        )
    fixed = (generate_half * tokens[0] - step.generate * tokens[1]) / apart * longest[0]
    return replace(step, fixed_share=min(max(fixed / step.generate, 0.0), 1.0))
