"""Line charts as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

Series = tuple[Sequence[int], Sequence[float]]

WIDTH, HEIGHT = 360, 190
LEFT, RIGHT, TOP, BOTTOM = 52, 8, 8, 22
MOST_POINTS = 400
"""More than that many steps are thinned: there are hardly more pixels."""


def line_chart(title: str, series: Mapping[str, Series], stacked: bool = False) -> str:
    """Return a figure of one or more series over steps, NaN and inf left out; empty where nothing is left.

    Args:
        title: above it.
        series: steps and values, by name.
        stacked: draw areas on top of each other, at the steps that all series have.
    """
    thin = {name: _thinned(*values) for name, values in series.items()}
    lines = {name: values for name, values in thin.items() if values[0]}
    if not lines or (stacked and max(len(xs) for xs, _ in lines.values()) < 2):  # an area needs two steps
        return ""
    areas = _stacked(lines) if stacked else None
    tops = {name: (xs, upper) for name, (xs, _, upper) in areas.items()} if areas else lines
    scale = _Scale(tops, from_zero=stacked)
    shapes = [_area(i, xs, lower, upper, scale) for i, (xs, lower, upper) in enumerate((areas or {}).values())]
    if not stacked:
        shapes = [_line(i, name, *values, scale) for i, (name, values) in enumerate(lines.items())]
    legend = "".join(f'<span class="key c{i}">{escape(name)}</span>' for i, name in enumerate(lines))
    return (
        f"<figure><figcaption><b>{escape(title)}</b><output></output></figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title, quote=True)}" {scale.attributes()}>'
        f'{scale.axes()}{"".join(shapes)}</svg><div class="legend">{legend if len(lines) > 1 else ""}</div></figure>'
    )


class _Scale:
    """From steps and values to the picture's coordinates."""

    def __init__(self, series: Mapping[str, Series], from_zero: bool) -> None:
        xs = [x for steps, _ in series.values() for x in steps]
        ys = [y for _, values in series.values() for y in values]
        self.x0, self.x1 = min(xs), max(max(xs), min(xs) + 1)
        self.ticks = nice_ticks(0.0 if from_zero else min(ys), max(ys))
        self.y0, self.y1 = min(self.ticks[0], *ys), max(self.ticks[-1], *ys)

    def x(self, step: float) -> float:
        return LEFT + (step - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y0) / (self.y1 - self.y0) * (HEIGHT - TOP - BOTTOM)

    def attributes(self) -> str:
        """What the page's script needs to go back from coordinates to values."""
        return f'data-x="{self.x0} {self.x1}" data-y="{self.y0:.6g} {self.y1:.6g}"'

    def axes(self) -> str:
        parts = []
        for tick in self.ticks:
            y = self.y(tick)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{tick:g}</text>')
        for step, anchor in ((self.x0, "start"), (self.x1, "end")):
            parts.append(f'<text x="{self.x(step):.1f}" y="{HEIGHT - 6}" text-anchor="{anchor}">{step}</text>')
        return "".join(parts)


def _line(index: int, name: str, xs: Sequence[int], ys: Sequence[float], scale: _Scale) -> str:
    points = " ".join(f"{scale.x(x):.1f},{scale.y(y):.1f}" for x, y in zip(xs, ys, strict=True))
    if len(xs) == 1:
        x, _, y = points.partition(",")
        return f'<circle class="c{index}" cx="{x}" cy="{y}" r="3"/>'
    return f'<polyline class="c{index}" data-name="{escape(name, quote=True)}" points="{points}"/>'


def _area(index: int, xs: Sequence[int], lower: Sequence[float], upper: Sequence[float], scale: _Scale) -> str:
    forth = [f"{scale.x(x):.1f},{scale.y(y):.1f}" for x, y in zip(xs, upper, strict=True)]
    back = [f"{scale.x(x):.1f},{scale.y(y):.1f}" for x, y in zip(reversed(xs), reversed(lower), strict=True)]
    return f'<polygon class="c{index}" points="{" ".join(forth + back)}"/>'


def _stacked(lines: Mapping[str, Series]) -> dict[str, tuple[Sequence[int], list[float], list[float]]]:
    steps = sorted(set.intersection(*(set(xs) for xs, _ in lines.values())))
    lower = [0.0] * len(steps)
    found: dict[str, tuple[Sequence[int], list[float], list[float]]] = {}
    for name, (xs, ys) in lines.items():
        at = dict(zip(xs, ys, strict=True))
        upper = [low + at[step] for low, step in zip(lower, steps, strict=True)]
        found[name] = (steps, lower, upper)
        lower = upper
    return found


def _thinned(xs: Sequence[int], ys: Sequence[float]) -> tuple[list[int], list[float]]:
    kept = [(x, y) for x, y in zip(xs, ys, strict=True) if math.isfinite(y)]
    every = max(1, math.ceil(len(kept) / MOST_POINTS))
    chosen = kept[::every] + ([kept[-1]] if kept and (len(kept) - 1) % every else [])
    return [x for x, _ in chosen], [y for _, y in chosen]


def nice_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return round numbers from at or below ``low`` to at or above ``high``, about ``count`` of them.

    Example:
        >>> nice_ticks(0.03, 0.97)
        [0.0, 0.5, 1.0]
    """
    if high <= low:
        margin = abs(low) / 10 or 1.0
        low, high = low - margin, high + margin
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-6), math.ceil(high / step - 1e-6)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]
