"""Data sources by name: Hugging Face ``datasets`` and the procedural tasks of ``reasoning-gym``."""

from __future__ import annotations

import ast
import difflib
import re
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from lightrl.optional import import_optional

DATASETS, GYM = "datasets:", "gym:"
_DATASET = re.compile(r"(?P<name>[^:]+)(:(?P<config>[^:\[\]]+))?:(?P<split>[^:\[\]]+(\[[^\]]*\])?)")


def read_datasets(spec: str) -> list[Any]:
    """Return the rows of ``"datasets:NAME:SPLIT"`` or ``"datasets:NAME:CONFIG:SPLIT"``.

    ``NAME`` is a folder written by ``save_to_disk``, or whatever ``datasets.load_dataset`` takes: a local folder or a
    data set on the hub.

    Raises:
        ValueError: ``datasets`` is not installed, the text is not of this form, or the data cannot be loaded.
    """
    found = _DATASET.fullmatch(spec.removeprefix(DATASETS))
    if found is None:
        raise ValueError(f"{spec!r} names no data: write 'datasets:NAME:SPLIT' or 'datasets:NAME:CONFIG:SPLIT'")
    datasets = import_optional("datasets", repr(spec))
    name, config, split = found["name"], found["config"], found["split"]
    try:
        if (Path(name) / "dataset_dict.json").is_file():
            return list(datasets.load_from_disk(name)[split].with_format(None).to_list())
        return list(datasets.load_dataset(name, config, split=split).with_format(None).to_list())
    except Exception as error:
        raise ValueError(f"{spec!r} cannot be loaded: {type(error).__name__}: {error}") from error


def gym_rows(task: str, size: int = 500, seed: int = 0, **config: Any) -> list[dict[str, Any]]:
    """Return ``size`` problems of a ``reasoning-gym`` task, for the reward :func:`lightrl.rewards.gym_score`.

    Args:
        task: its name, such as ``"chain_sum"``.
        size: how many.
        seed: of the generator; another seed gives other problems.
        config: the task's own settings, such as ``min_terms=2``.

    Raises:
        ValueError: ``reasoning-gym`` is not installed, there is no such task, or it does not take such settings.
    """
    entries = gym_task(task, size=size, seed=seed, **config)
    return [
        {
            "prompt": [{"role": "user", "content": entry["question"]}],
            "answer": entry["answer"],
            "data_source": task,
            "entry": entry,
            "gym_config": config,
        }
        for entry in (entries[i] for i in range(size))
    ]


def gym_task(task: str, **config: Any) -> Any:
    """Return a task of ``reasoning-gym``; raises like :func:`gym_rows`."""
    gym, names = import_optional("reasoning_gym", f"the task {task!r}"), _gym_names()
    if task not in names:
        near = difflib.get_close_matches(task, names, n=3)
        raise ValueError(f"reasoning-gym has no task {task!r}: did you mean one of {near or list(names)[:8]}?")
    try:
        return gym.create_dataset(task, **config)
    except (TypeError, AssertionError, ValueError) as error:
        raise ValueError(f"the reasoning-gym task {task!r} does not take {config}: {error}") from error


def read_gym(spec: str) -> list[dict[str, Any]]:
    """Return the rows of ``"gym:TASK"`` or ``"gym:TASK?size=1000&seed=1&min_terms=2"``; see :func:`gym_rows`.

    Raises:
        ValueError: see :func:`gym_rows`.
    """
    task, _, query = spec.removeprefix(GYM).partition("?")
    return gym_rows(task, **{name: _literal(text) for name, text in parse_qsl(query)})


@cache
def _gym_names() -> tuple[str, ...]:
    return tuple(sorted(import_optional("reasoning_gym.factory", "a task").DATASETS))


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
