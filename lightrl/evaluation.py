"""Held-out metrics by prompt, from several samples of each: mean@k, pass@k and maj@k.

Each adds up one number a prompt and divides by the prompts it was told of, so that neither ranks nor an incomplete last
batch weigh in. Samples that nobody scored (reward None) are left out of their prompt, and prompts with too few scored
samples out of the metric.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from functools import lru_cache
from math import comb
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightrl.arguments import check_at_least_one

Rewards = Sequence[Sequence[float | None]]
"""For each prompt the reward of each sample, None where nobody scored it."""


class _PromptMean(Metric):
    """Mean over prompts, on all ranks."""

    full_state_update = False
    total: Tensor
    prompts: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("prompts", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def _add(self, values: Sequence[float]) -> None:
        self.total += sum(values)
        self.prompts += len(values)

    def compute(self) -> Tensor:
        """Return the mean over all prompts so far; NaN without any."""
        return self.total / self.prompts


class MeanAtK(_PromptMean):
    """mean@k: the mean reward of a prompt's samples, averaged over prompts.

    Example:
        >>> metric = MeanAtK()
        >>> metric.update([[1.0, 0.0], [0.5, None]])
        >>> metric.compute().item()
        0.5
    """

    def update(self, rewards: Rewards) -> None:
        """Add prompts: ``rewards`` has one row a prompt, with one entry a sample."""
        scored = [[r for r in row if r is not None] for row in rewards]
        self._add([sum(row) / len(row) for row in scored if row])


class _OfKSamples(_PromptMean):
    """Of k samples, each right from a reward of ``threshold`` on."""

    def __init__(self, k: int, threshold: float = 1.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.k, self.threshold = _count(k), threshold


class PassAtK(_OfKSamples):
    """pass@k: the chance that one of k samples is right, without bias from the n >= k there are (arXiv:2107.03374).

    Of n samples, c right: ``1 - C(n - c, k) / C(n, k)``.

    Args:
        k: samples.
        threshold: the reward from which a sample is right.
        kwargs: of ``torchmetrics.Metric``.

    Raises:
        ValueError: ``k`` is below 1.

    Example:
        >>> metric = PassAtK(2)
        >>> metric.update([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])  # 2/3 of the pairs have the right one; none has
        >>> round(metric.compute().item(), 4)
        0.3333
    """

    def update(self, rewards: Rewards) -> None:
        """Add prompts: ``rewards`` has one row a prompt, with one entry a sample."""
        rows = [[r >= self.threshold for r in row if r is not None] for row in rewards]
        self._add([pass_at_k(len(row), sum(row), self.k) for row in rows if len(row) >= self.k])


class MajorityAtK(_OfKSamples):
    """maj@k: the chance that the most frequent answer of k samples is right, exact over all choices of k from the n.

    Samples without an answer do not vote. Answers that are equally frequent share the vote; an answer whose samples got
    different rewards is right by the share that is (self-consistency, arXiv:2203.11171).

    Args:
        k: samples.
        threshold: the reward from which a sample is right.
        kwargs: of ``torchmetrics.Metric``.

    Raises:
        ValueError: ``k`` is below 1.

    Example:
        >>> metric = MajorityAtK(3)
        >>> metric.update([[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]], [["7", "7", "8"], ["7", "8", "9"]])  # 1; a third
        >>> round(metric.compute().item(), 4)
        0.6667
    """

    def update(self, rewards: Rewards, answers: Sequence[Sequence[Hashable | None]]) -> None:
        """Add prompts: ``rewards`` and ``answers`` have one row a prompt, with one entry a sample."""
        rows = [
            [(a, r >= self.threshold) for r, a in zip(row, said, strict=True) if r is not None]
            for row, said in zip(rewards, answers, strict=True)
        ]
        self._add([majority_at_k(row, self.k) for row in rows if len(row) >= self.k])


def pass_at_k(n: int, right: int, k: int) -> float:
    """Return the chance that k of n samples, drawn without repetition, have one of the ``right`` ones among them."""
    return 1.0 - comb(n - right, k) / comb(n, k)


def majority_at_k(samples: Sequence[tuple[Hashable | None, bool]], k: int) -> float:
    """Return the chance that the vote of k of the samples is right.

    Args:
        samples: answer (None: no vote) and whether it is right.
        k: at most their number.
    """
    right: dict[Hashable, list[bool]] = defaultdict(list)
    for answer, is_right in samples:
        if answer is not None:
            right[answer].append(is_right)
    votes = Counter({answer: len(found) for answer, found in right.items()})
    chance = 0.0
    for answer, found in right.items():
        others = tuple(sorted((votes - Counter({answer: len(found)})).values()))
        chance += sum(found) / len(found) * _wins(len(found), others, len(samples), k)
    return chance


@lru_cache(maxsize=4096)
def _wins(own: int, others: tuple[int, ...], n: int, k: int) -> float:
    """Chance that an answer given ``own`` times wins the vote of k of n samples; ties are drawn by lot.

    ``ways[drawn, tied]`` counts the choices among the other answers that draw so many samples and tie with so many.
    """
    silent = n - own - sum(others)
    total = 0.0
    for mine in range(1, min(own, k) + 1):
        ways = {(drawn, 0): comb(silent, drawn) for drawn in range(min(silent, k - mine) + 1)}
        for votes in others:
            longer: dict[tuple[int, int], int] = defaultdict(int)
            for (drawn, tied), count in ways.items():
                for theirs in range(min(votes, mine, k - mine - drawn) + 1):
                    longer[drawn + theirs, tied + (theirs == mine)] += count * comb(votes, theirs)
            ways = longer
        shares = sum(count / (tied + 1) for (drawn, tied), count in ways.items() if drawn == k - mine)
        total += comb(own, mine) * shares
    return total / comb(n, k)


def _count(k: int) -> int:
    check_at_least_one(k=k)
    return k
