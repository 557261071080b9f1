"""Means that are right under NaN entries, micro-batches, masks and ranks."""

import pytest
import torch
from torch import Tensor

from lightrl.meter import Meter

NAN = float("nan")


def test_b29_nan_entries_are_skipped() -> None:
    meter = Meter()
    for value in (0.5, NAN, NAN, 0.8, 0.6, 0.7):
        meter.add("reward/x", value)
        meter.add("reward/y", NAN)
    meter.add("reward/z", torch.tensor([NAN, NAN]))
    assert meter.means() == {"reward/x": pytest.approx(0.65)}


def test_b29_means_are_weighted_by_what_they_are_means_of() -> None:
    meter = Meter()
    for accuracy, rows in ((0.7, 256), (0.8, 256), (0.9, 10)):
        meter.add_all({"accuracy": accuracy}, torch.ones(rows, dtype=torch.bool))
    assert meter.means()["accuracy"] == pytest.approx(0.75287, abs=1e-5)


def test_b29_ranks_with_three_and_one_samples() -> None:
    meters = [Meter(), Meter()]
    meters[0].add("reward/mean", torch.ones(3))
    meters[1].add("reward/mean", torch.zeros(1))
    meters[0].add("only/rank_0", 5.0)
    meters[1].add("only/rank_0", NAN)
    rows: list[Tensor] = []
    for meter in meters:
        meter.means(lambda x: rows.append(x) or x)  # type: ignore[func-returns-value]
    for meter in meters:
        assert meter.means(lambda _: rows[0] + rows[1]) == {"reward/mean": 0.75, "only/rank_0": 5.0}


def test_b29_logged_tensors_are_detached() -> None:
    x = torch.ones(3, requires_grad=True)
    meter = Meter()
    meter.add("a", (x * 2).sum())
    meter.add_all({"b": x * 3}, torch.ones(3, dtype=torch.bool))
    assert not any(t.requires_grad for pair in meter._sums.values() for t in pair)
    assert meter.means() == {"a": 6.0, "b": 3.0}


def test_sums_are_in_double_precision() -> None:
    meter = Meter()
    meter.add("a", 2.0**24)
    for _ in range(100):
        meter.add("a", 1.0)
    assert meter.means()["a"] == (2.0**24 + 100) / 101


def test_masked_entries_do_not_count_whatever_they_hold() -> None:
    meter = Meter()
    meter.add("a", torch.tensor([1.0, float("inf"), 3.0, NAN]), mask=torch.tensor([True, False, True, True]))
    assert meter.means() == {"a": 2.0}


def test_what_a_loss_returns_is_averaged_over_live_tokens() -> None:
    meter = Meter()
    per_token = torch.tensor([1.0, NAN, 3.0, 100.0])
    meter.add_all({"token": per_token, "number": 1.0, "scalar": torch.tensor(1.0)}, torch.tensor([1, 1, 1, 0]).bool())
    meter.add_all({"token": torch.tensor([8.0]), "number": 5.0, "scalar": torch.tensor(5.0)}, torch.tensor([True]))
    assert meter.means() == {"token": 4.0, "number": 2.0, "scalar": 2.0}  # (1 + 3 + 8) / 3 and (3 * 1 + 5) / 4


def test_a_rank_with_nothing_live_has_the_same_names() -> None:
    meter = Meter()
    meter.add_all({"token": torch.tensor([NAN]), "number": NAN, "scalar": torch.tensor(1.0)}, torch.tensor([False]))
    shapes: list[torch.Size] = []
    assert meter.means(lambda x: shapes.append(x.shape) or x) == {}  # type: ignore[func-returns-value]
    assert shapes == [(6,)]


def test_nothing_added() -> None:
    assert Meter().means() == {}


def test_a_quantile_is_of_the_live_values_of_all_micro_batches_and_ranks() -> None:
    values = torch.cat([torch.arange(1.0, 201.0) / 100, torch.tensor([NAN, 50.0])])
    live = values != 50
    meters = [Meter(), Meter()]
    for meter, half, mask in zip(meters, values.chunk(2), live.chunk(2), strict=True):
        meter.add("needs/one", 1.0)
        for part, m in zip(half.chunk(3), mask.chunk(3), strict=True):
            meter.add_quantile("gap", part, 0.99, mask=m)
    rows: list[Tensor] = []
    for meter in meters:
        meter.means(lambda x: rows.append(x) or x)  # type: ignore[func-returns-value]
    found = meters[0].means(lambda _: rows[0] + rows[1])["gap"]
    assert 1.98 <= found < 1.98 * 1.05  # the 198th of 200


@pytest.mark.parametrize(("values", "right"), [([0.0, 0.0], 0.0), ([NAN], 0.0), ([1e-9, 1e-9], 0.0), ([1e9], 2.0**8)])
def test_a_quantile_beyond_its_bins(values: list[float], right: float) -> None:
    meter = Meter()
    meter.add("needs/one", 1.0)
    meter.add_quantile("gap", torch.tensor(values), 0.99, mask=torch.ones(len(values), dtype=torch.bool))
    assert meter.means()["gap"] == right
