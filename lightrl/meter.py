"""Metrics as (sum, count): right under micro-batches, ranks and NaN entries."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor


class Meter:
    """Adds up the metrics of one optimizer step and averages once over everything they are means of.

    Example:
        >>> m = Meter()
        >>> m.add("reward/mean", torch.tensor([0.5, float("nan"), 0.8]))
        >>> m.add("reward/mean", torch.tensor([0.7]))
        >>> round(m.means()["reward/mean"], 4)
        0.6667
    """

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Tensor, Tensor]] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, name: str, values: Tensor | float, *, mask: Tensor | None = None, weight: float = 1.0) -> None:
        """Add values to the mean called ``name``.

        Args:
            name: metric key.
            values: any shape; NaN entries are skipped.
            mask: like ``values``: False entries are skipped.
            weight: how many entries each value stands for.
        """
        values = torch.as_tensor(values).detach().double()
        keep = ~values.isnan()
        if mask is not None:
            keep = keep & mask
        total = torch.where(keep, values, torch.zeros_like(values)).sum() * weight
        self.add_sum(name, total, keep.sum() * weight)

    def add_sum(self, name: str, total: Tensor | float, count: Tensor | float) -> None:
        """Add a sum over ``count`` entries to the mean called ``name``."""
        total, count = torch.as_tensor(total).double(), torch.as_tensor(count).double()
        if name in self._sums:
            before = self._sums[name]
            total, count = before[0].to(total.device) + total, before[1].to(count.device) + count
        self._sums[name] = (total, count)

    def add_max(self, name: str, values: Tensor, *, mask: Tensor) -> None:
        """Add values to the maximum called ``name``, NaN and masked entries skipped; it is 0 where there are none."""
        values = values.detach().double()
        largest = torch.where(mask & ~values.isnan(), values, 0.0).amax()
        self._maxima[name] = torch.maximum(self._maxima[name], largest) if name in self._maxima else largest

    def add_all(self, metrics: Mapping[str, Tensor | float], mask: Tensor) -> None:
        """Add what a loss returns: tensors shaped like ``mask`` token by token, numbers once for each live token."""
        live = float(mask.sum())
        for name, value in metrics.items():
            if isinstance(value, Tensor) and value.shape == mask.shape:
                self.add(name, value, mask=mask)
            elif live:
                self.add(name, value, weight=live)
            else:
                self.add_sum(name, 0.0, 0.0)  # every rank must have the same names

    def means(
        self,
        reduce_sum: Callable[[Tensor], Tensor] = lambda x: x,
        reduce_max: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> dict[str, float]:
        """Return the means, and the maxima, over ranks; names of means without a single entry are left out.

        Every rank must have the same names: they are put in order, and each kind is reduced in one call.
        """
        if not self._sums:
            return {}
        names = sorted(self._sums)
        device = max((s.device for s, _ in self._sums.values()), key=lambda d: d.type != "cpu")
        both = torch.stack([torch.stack([self._sums[n][0].to(device), self._sums[n][1].to(device)]) for n in names])
        rows = reduce_sum(both).tolist()
        means = {n: total / count for n, (total, count) in zip(names, rows, strict=True) if count > 0}
        if self._maxima:
            largest = reduce_max(torch.stack([self._maxima[n] for n in sorted(self._maxima)])).tolist()
            means |= dict(zip(sorted(self._maxima), largest, strict=True))
        return means
