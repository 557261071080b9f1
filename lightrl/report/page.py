"""A run as one HTML file that needs nothing else: no network, no other file."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from lightrl.floors import STAGES
from lightrl.report.charts import line_chart
from lightrl.report.run_folder import Run, Scalars, read_run

MOST_SAMPLES, LONGEST_TEXT = 120, 1500
HEADLINES = ("reward/mean", "val/reward", "kl/ref", "kl/mismatch", "rollout/length_mean", "perf/tokens_per_second")
TOGETHER: dict[str, tuple[str, ...]] = {
    "Reward": ("reward/mean", "val/reward"),
    "Generation, seconds": ("time/generate", "floor/generate"),
    "Training, seconds": ("time/train_step", "floor/train"),
    "Weight push, seconds": ("time/weight_sync", "floor/sync"),
}
"""Charts of several metrics; all others have one each, but for those of one kind below ``val/``."""


def write_report(folder: str | Path, out: str | Path | None = None) -> Path:
    """Write the page of a run and return where it is.

    Args:
        folder: of the run; see :func:`read_run`.
        out: the file; None: ``report.html`` in the run's folder.

    Raises:
        ValueError: there is no run in ``folder``.
    """
    run = read_run(folder)
    html = page(run)
    path = run.folder / "report.html" if out is None else Path(out)
    half = path.with_suffix(".part")
    half.write_text(html, encoding="utf-8")
    os.replace(half, path)  # whoever has it open sees the old page or the new one
    return path


def page(run: Run) -> str:
    """Return the page of a run."""
    assets = files("lightrl.report")
    style, script = ((assets / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    steps = max(xs[-1] for xs, _ in run.scalars.values())
    body = [
        f"<header><h1>{escape(run.folder.name)}</h1><p>up to step {steps}, {len(run.scalars)} metrics</p></header>",
        f'<section class="headlines">{_headlines(run.scalars)}</section>',
        _section("Curves", _first_charts(run.scalars)),
        _section("Where the time goes", _time(run.scalars)),
        _section("Samples", _samples(run.rollouts)),
        _section("All metrics", _other_charts(run.scalars)),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{escape(run.folder.name)}</title><style>{style}</style></head><body>{''.join(body)}"
        f"<script>{script}</script></body></html>"
    )


def _section(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>{content}</section>" if content else ""


def _headlines(scalars: Scalars) -> str:
    names = [n for n in (*HEADLINES, *sorted(n for n in scalars if _kind(n))) if n in scalars]
    tiles = []
    for name in names:
        values = [v for v in scalars[name][1] if math.isfinite(v)]
        if values:
            change = f"from {_number(values[0])}" if len(values) > 1 else ""
            tiles.append(f"<div><span>{escape(name)}</span><b>{_number(values[-1])}</b><small>{change}</small></div>")
    return "".join(tiles)


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _kind(name: str) -> str | None:
    """``pass@``, ``maj@`` or ``mean@`` of a held-out metric, whose k go into one chart."""
    return name[4 : name.index("@") + 1] if name.startswith("val/") and "@" in name else None


def _first_charts(scalars: Scalars) -> str:
    charts = [_chart("Reward", TOGETHER["Reward"], scalars)]
    for kind in sorted({k for n in scalars if (k := _kind(n))}):
        names = sorted((n for n in scalars if _kind(n) == kind), key=lambda n: int(n.rpartition("@")[2]))
        charts.append(_chart(f"Held-out {kind}k", names, scalars))
    charts += [_chart(n, (n,), scalars) for n in ("kl/ref", "kl/mismatch", "train/entropy", "rollout/length_mean")]
    return _grid(charts)


def _time(scalars: Scalars) -> str:
    shares = {stage: scalars[f"split/{stage}"] for stage in STAGES if f"split/{stage}" in scalars}
    charts = [line_chart("Share of a rollout batch's time", shares, stacked=True)] if shares else []
    return _grid([*charts, *(_chart(title, TOGETHER[title], scalars) for title in list(TOGETHER)[1:])])


def _other_charts(scalars: Scalars) -> str:
    shown = {name for names in TOGETHER.values() for name in names} | {n for n in scalars if n.startswith("split/")}
    shown |= {n for n in scalars if _kind(n)} | {"epoch", "hp_metric"}
    return _grid([_chart(name, (name,), scalars) for name in scalars if name not in shown])


def _chart(title: str, names: Sequence[str], scalars: Scalars) -> str:
    return line_chart(title, {name: scalars[name] for name in names if name in scalars})


def _grid(charts: list[str]) -> str:
    drawn = "".join(charts)
    return f'<div class="grid">{drawn}</div>' if drawn else ""


def _samples(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return ""
    every = max(1, math.ceil(len(rows) / MOST_SAMPLES))
    rewards = [r["reward"] for r in rows if r["reward"] is not None]
    low, high = min(rewards, default=0.0), max(rewards, default=0.0)
    lines = [_sample(r, low, high) for r in rows[::-1][::every]]
    kept = f"<p>{len(lines)} of {len(rows)} that were logged, the latest first; from red (lowest reward) to green.</p>"
    buttons = "".join(f'<button data-split="{s}">{s or "all"}</button>' for s in ("", "train", "val"))
    head = (
        '<tr><th>step</th><th></th><th>reward</th><th>tokens</th><th class="prompt">prompt</th><th>completion</th></tr>'
    )
    return (
        f'{kept}<div class="buttons">{buttons}</div><table><thead>{head}</thead><tbody>{"".join(lines)}</tbody></table>'
    )


def _sample(r: dict[str, Any], low: float, high: float) -> str:
    reward = r["reward"]
    share = 0.5 if reward is None or high <= low else (reward - low) / (high - low)
    terms = escape(str(r["terms"]), quote=True)
    shown, css = ("-", "reward") if reward is None else (f"{reward:.3f}", "reward scored")
    cut = " <i>(truncated)</i>" if r["truncated"] else ""
    prompt, completion = (escape(_shortened(r[part])) for part in ("prompt", "completion"))
    return (
        f'<tr data-split="{escape(r["split"], quote=True)}"><td>{r["step"]}</td><td>{escape(r["split"])}</td>'
        f'<td class="{css}" title="{terms}" style="--share:{share:.3f}">{shown}</td><td>{r["tokens"]}</td>'
        f"<td><pre>{prompt}</pre></td><td><pre>{completion}</pre>{cut}</td></tr>"
    )


def _shortened(text: str) -> str:
    half = LONGEST_TEXT // 2
    return text if len(text) <= LONGEST_TEXT else f"{text[:half]}\n[...]\n{text[-half:]}"
