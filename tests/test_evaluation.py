"""mean@k, pass@k and maj@k against a count of every choice of k samples."""

import itertools
import random
from collections import Counter, defaultdict
from typing import Any

import pytest
import torch

from lightrl.evaluation import MajorityAtK, MeanAtK, PassAtK, majority_at_k, pass_at_k

Samples = list[tuple[str | None, bool]]


def by_hand(samples: Samples, k: int) -> tuple[float, float]:
    """pass@k and maj@k as they are defined: over all choices of k of the samples."""
    right = defaultdict(list)
    for answer, is_right in samples:
        right[answer].append(is_right)
    passes, votes = [], []
    for chosen in itertools.combinations(samples, k):
        passes.append(any(is_right for _, is_right in chosen))
        counts = Counter(answer for answer, _ in chosen if answer is not None)
        winners = [a for a, n in counts.items() if n == max(counts.values())]
        shares = [sum(right[a]) / len(right[a]) for a in winners]
        votes.append(sum(shares) / len(shares) if shares else 0.0)
    return sum(passes) / len(passes), sum(votes) / len(votes)


def test_every_choice_of_k_samples_is_counted() -> None:
    rng = random.Random(0)
    for _ in range(200):
        n = rng.randint(1, 8)
        samples: Samples = [(rng.choice([None, "a", "b", "c", "d"]), rng.random() < 0.4) for _ in range(n)]
        for k in range(1, n + 1):
            passed, voted = by_hand(samples, k)
            assert pass_at_k(n, sum(r for _, r in samples), k) == pytest.approx(passed, abs=1e-12)
            assert majority_at_k(samples, k) == pytest.approx(voted, abs=1e-12)


def test_many_samples_take_no_time() -> None:
    samples: Samples = [(str(i % 9), i % 9 == 0) for i in range(64)]
    assert majority_at_k(samples, 64) == 1.0  # eight votes for the right one, seven for each of the others
    assert 0.11 < majority_at_k(samples, 16) < 0.3


def test_prompts_weigh_the_same_whatever_the_batches() -> None:
    rewards = [[1.0, 0.0, 1.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.5, 1.0, 0.0], [1.0, 0.0, 0.0]]
    answers = [["a", "b", "a"], ["a", "b", "c"], ["a", "a", "a"], ["b", "a", "b"], ["a", "b", None]]
    right = {"mean": (2 / 3 + 0 + 1 + 0.5 + 1 / 3) / 5, "pass": (1 + 0 + 1 + 2 / 3 + 2 / 3) / 5}
    # Two of three: the pair (a, b) ties, so each answer has half of it.
    right["maj"] = ((1 + 0.5 + 0.5) / 3 + 0 + 1 + (0.5 + 0 + 0.5) / 3 + (0.5 + 1 + 0) / 3) / 5
    for size in (1, 2, 5):
        metrics: dict[str, Any] = {"mean": MeanAtK(), "pass": PassAtK(2), "maj": MajorityAtK(2)}
        for i in range(0, 5, size):
            metrics["mean"].update(rewards[i : i + size])
            metrics["pass"].update(rewards[i : i + size])
            metrics["maj"].update(rewards[i : i + size], answers[i : i + size])
        assert {name: metric.compute().item() for name, metric in metrics.items()} == pytest.approx(right)


def test_b01_what_nobody_scored_is_left_out_of_its_prompt() -> None:
    rewards = [[1.0, None, 0.0], [None, None, None], [None, 1.0, None]]
    mean, passed, vote = MeanAtK(), PassAtK(2), MajorityAtK(2)
    mean.update(rewards)
    passed.update(rewards)
    vote.update(rewards, [["a", "b", "b"], ["a", "a", "a"], ["a", "a", "a"]])
    assert mean.compute() == 0.75  # 1/2 and 1; the second prompt has no mean
    assert passed.compute() == 1.0  # of the first prompt alone: the others have fewer than two scored samples
    assert vote.compute() == 0.5
    empty = MeanAtK()
    empty.update([[None]])
    assert torch.isnan(empty.compute())


@pytest.mark.parametrize("metric", [PassAtK, MajorityAtK])
def test_k_below_one(metric: Any) -> None:
    with pytest.raises(ValueError, match="k=0 must be at least 1"):
        metric(0)
