"""What a run leaves in its folder: scalars of TensorBoardLogger or CSVLogger, rollouts of RolloutLogger."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

Scalars = dict[str, tuple[list[int], list[float]]]
"""Steps and values of each metric, in order of step."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run's folder, read."""

    folder: Path
    scalars: Scalars
    rollouts: list[dict[str, Any]]
    """Rows as :class:`~lightrl.callbacks.RolloutLogger` wrote them; empty without it."""


def read_run(folder: str | Path) -> Run:
    """Read the folder of a run, or the newest ``version_N`` below it that trained, else the newest that has scalars.

    Raises:
        ValueError: the folder is missing, or no logger wrote scalars there.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(
            f"there is no folder {str(folder)!r}: give the folder of a run, such as lightning_logs/version_0"
        )
    if not _has_scalars(folder):
        versions = [p for p in folder.rglob("version_*") if _has_scalars(p)]
        validated: tuple[Path, Scalars] | None = None
        for version in sorted(versions, key=lambda p: p.stat().st_mtime, reverse=True):
            scalars = _scalars(version)
            if any(name.startswith("train/") for name in scalars):
                return Run(version, scalars, read_rollouts(version))
            validated = validated or ((version, scalars) if scalars else None)
        if validated is not None:
            return Run(*validated, read_rollouts(validated[0]))
    return Run(folder, read_scalars(folder), read_rollouts(folder))


def _has_scalars(folder: Path) -> bool:
    return (folder / "metrics.csv").is_file() or any(folder.glob("events.out.tfevents.*"))


def read_scalars(folder: str | Path) -> Scalars:
    """Return every scalar that TensorBoardLogger or CSVLogger wrote to ``folder``.

    Raises:
        ValueError: neither did.
    """
    scalars = _scalars(folder)
    if not scalars:
        raise ValueError(
            f"no TensorBoard scalars in {folder}, and no metrics.csv: is it the folder of a run, and had its Trainer a "
            "TensorBoardLogger or CSVLogger?"
        )
    return scalars


def _scalars(folder: str | Path) -> Scalars:
    table = Path(folder) / "metrics.csv"
    found = _of_csv(table) if table.is_file() else _of_tensorboard(folder)
    return {name: found[name] for name in sorted(found)}


def _of_tensorboard(folder: str | Path) -> Scalars:
    # validate and fit each open a file of their own: steps that start again are not a restarted run to forget.
    events = EventAccumulator(str(folder), size_guidance={SCALARS: 0}, purge_orphaned_data=False).Reload()
    return {tag: _in_order({e.step: e.value for e in events.Scalars(tag)}) for tag in events.Tags()[SCALARS]}


def _of_csv(path: Path) -> Scalars:
    found: dict[str, dict[int, float]] = {}
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            for name, value in line.items():
                if value and name not in ("step", "epoch"):
                    found.setdefault(name, {})[int(line["step"])] = float(value)
    return {name: _in_order(values) for name, values in found.items()}


def _in_order(values: dict[int, float]) -> tuple[list[int], list[float]]:
    steps = sorted(values)
    return steps, [values[step] for step in steps]


def read_rollouts(folder: str | Path) -> list[dict[str, Any]]:
    """Return the rows that RolloutLogger wrote to ``folder``, from JSON lines or parquet; none without it.

    A line that is not whole, as a killed run may leave it, is passed over.
    """
    lines, tables = Path(folder) / "rollouts.jsonl", Path(folder) / "rollouts"
    if lines.is_file():
        return [found for line in lines.read_text().splitlines() if (found := _row(line)) is not None]
    return [r for path in sorted(tables.glob("*.parquet")) for r in pq.read_table(path).to_pylist()]


def _row(line: str) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(line)
    except json.JSONDecodeError:
        return None
    return found
