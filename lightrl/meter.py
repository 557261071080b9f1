"""Metrics as sums and counts: right under micro-batches, ranks and NaN entries."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

_LOWEST, _OCTAVES, _STEPS = -24, 32, 16
"""Bins of quantiles: from 2^-24 (about 6e-8), 32 octaves in 16 steps each, so that neighbours are 4 % apart."""


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
        self._histograms: dict[str, tuple[Tensor, float]] = {}

    def add(self, name: str, values: Tensor | float, *, mask: Tensor | None = None) -> None:
        """Add values to the mean called ``name``.

        Args:
            name: metric key.
            values: any shape; NaN entries are skipped.
            mask: False entries are skipped; of a shape that ``values`` have or can be expanded to.
        """
        values = torch.as_tensor(values).detach().double()
        keep = ~values.isnan()
        if mask is not None:
            keep = keep & mask
        total = torch.where(keep, values, torch.zeros_like(values)).sum()
        self.add_sum(name, total, keep.sum())

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

    def add_quantile(self, name: str, values: Tensor, q: float, *, mask: Tensor) -> None:
        """Add values to the quantile called ``name``: found to 5 %, above; 0 where there are none or it is below 6e-8.

        Args:
            name: metric key.
            values: any shape, 0 or more; NaN entries are skipped.
            q: 0.99 for the value that one in a hundred exceeds; one a name.
            mask: like ``values``: False entries are skipped.
        """
        values = values.detach().double()
        bins = ((values.nan_to_num(0.0).log2() - _LOWEST) * _STEPS).floor().clamp(-1, _OCTAVES * _STEPS - 1).long() + 1
        counts = torch.zeros(_OCTAVES * _STEPS + 1, dtype=torch.float64, device=values.device)
        counts.index_add_(0, bins.flatten(), (mask & ~values.isnan()).double().flatten())
        self._histograms[name] = (self._histograms[name][0] + counts if name in self._histograms else counts, q)

    def add_all(self, metrics: Mapping[str, Tensor | float], mask: Tensor) -> None:
        """Add what a loss returns: tensors shaped like ``mask`` token by token, numbers once for each live token."""
        for name, value in metrics.items():
            if not isinstance(value, Tensor):
                value = mask.new_full((), value, dtype=torch.float64)
            if value.shape != mask.shape:
                # As often as there are tokens: to ask a GPU how many are live would have it run dry.
                value = value.to(mask.device).reshape(-1, *[1] * mask.ndim).expand(-1, *mask.shape)
            self.add(name, value, mask=mask)

    def means(
        self,
        reduce_sum: Callable[[Tensor], Tensor] = lambda x: x,
        reduce_max: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> dict[str, float]:
        """Return means, quantiles and maxima over ranks; names of means without a single entry are left out.

        Every rank must have the same names: they are put in order, and each kind is reduced in one call.
        """
        return self.reduced(reduce_sum, reduce_max)()

    def reduced(
        self,
        reduce_sum: Callable[[Tensor], Tensor] = lambda x: x,
        reduce_max: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> Callable[[], dict[str, float]]:
        """Begin what :meth:`means` does; what is returned waits for the device and gives the means.

        The device gets no work in between that it would have to end first, so it can be given more before the wait.
        """
        if not self._sums:
            return dict
        names, quantiles, maxima = sorted(self._sums), sorted(self._histograms), sorted(self._maxima)
        device = max((s.device for s, _ in self._sums.values()), key=lambda d: d.type != "cpu")
        columns = [_gathered([self._sums[n][i] for n in names], device) for i in (0, 1)]
        sums = reduce_sum(torch.cat([*columns, *(self._histograms[n][0].to(device) for n in quantiles)]))
        largest = reduce_max(torch.stack([self._maxima[n] for n in maxima])).to(device) if maxima else sums[:0]
        arrived = _to_host(torch.cat([sums, largest]))

        def means() -> dict[str, float]:
            sizes = [len(names)] * 2 + [_OCTAVES * _STEPS + 1] * len(quantiles) + [len(maxima)]
            totals, counts, *histograms, top = arrived().split(sizes)
            pairs = zip(names, totals.tolist(), counts.tolist(), strict=True)
            found = {n: total / count for n, total, count in pairs if count}
            for name, histogram in zip(quantiles, histograms, strict=True):
                found[name] = _quantile(histogram, self._histograms[name][1])
            return found | dict(zip(maxima, top.tolist(), strict=True))

        return means


def _gathered(values: list[Tensor], device: torch.device) -> Tensor:
    """Return scalars of any devices, in order, as one tensor on ``device``, without waiting for it."""
    here = [v.device.type == "cpu" for v in values]
    host = torch.stack([v if h else torch.zeros((), dtype=v.dtype) for v, h in zip(values, here, strict=True)])
    if all(here):
        return host.to(device)
    moved = host.to(device, non_blocking=True)
    return torch.stack([moved[i] if h else v for i, (v, h) in enumerate(zip(values, here, strict=True))])


def _to_host(values: Tensor) -> Callable[[], Tensor]:
    """Begin to copy ``values``; what is returned waits for them."""
    if not values.is_cuda:
        return lambda: values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def arrived() -> Tensor:
        copied.synchronize()
        return host

    return arrived


def log_step(module: Any, means: Mapping[str, float], shown: frozenset[str] = frozenset()) -> None:
    """Log what is known of one optimizer step, equal on all ranks; ``shown`` are the names for the progress bar."""
    for name, value in means.items():
        # Of a plain number Lightning would make a tensor on the device, and wait for all that runs there.
        on_host = torch.tensor(float(value))
        module.log(name, on_host, on_step=True, on_epoch=False, prog_bar=name in shown, batch_size=1)


def _quantile(counts: Tensor, q: float) -> float:
    """Upper edge of the bin in which the ceil(q n)-th smallest of n values lies."""
    cumulative = counts.cumsum(0)
    bin_ = int((cumulative < math.ceil(q * float(cumulative[-1]))).sum())
    return float(2.0 ** (_LOWEST + bin_ / _STEPS)) if bin_ else 0.0
