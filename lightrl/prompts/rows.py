"""Rows of a data set as a list of dicts, whatever the source; each fault is one ValueError that says what to change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightrl.prompts.named import DATASETS, GYM, read_datasets, read_gym
from lightrl.rewards.extract import hash_answer

Row = dict[str, Any]
_SHOWN = 120


def load_rows(source: Any) -> list[Row]:
    """Load all rows of a data source.

    Args:
        source: Path of a ``.parquet`` file or of JSON lines (``.jsonl``, ``.json``), ``"datasets:NAME:SPLIT"``,
            ``"gym:TASK"`` (see :mod:`lightrl.prompts.named`), a ``datasets.Dataset``, a list of dicts, or a list of
            prompt strings. Each row has a ``prompt`` (a string or a list of chat messages, the same in every row) or,
            as in GSM8K, a ``question``, which becomes one user message; and what a reward compares with, see
            :func:`ground_truth`. Other columns are kept and handed to rewards by name.

    Returns:
        One dict for each row, in the order of the source; ``reward_model`` is a dict even where the file held a JSON
        string.

    Raises:
        ValueError: If the source is missing, unreadable or empty, a row has no usable prompt, or ground truths are of
            different types. Rows count from 0, lines from 1.
    """
    where = _describe(source)
    raw = _read(source, where)
    if not raw:
        raise ValueError(f"{where} is empty: it has no rows. Give at least as many prompts as one step needs.")
    rows = [_as_row(item, i, where) for i, item in enumerate(raw)]
    kind = _prompt_kind(rows[0], 0, where)
    for i, row in enumerate(rows):
        found = _prompt_kind(row, i, where)
        if found != kind:
            raise ValueError(
                f"{where} mixes prompt types: row 0 has {kind}, row {i} has {found} ({_short(row['prompt'])}). "
                "Use either strings or chat messages in the whole 'prompt' column."
            )
    _check_ground_truths(rows, where)
    return rows


def ground_truth(row: Row) -> Any:
    """Return what a reward compares with.

    The first of ``reward_model["ground_truth"]``, ``ground_truth`` and ``answer`` that the row has, or None. Of an
    ``answer`` in GSM8K's form it is what follows ``####``.
    """
    reward_model = row.get("reward_model")
    if isinstance(reward_model, dict) and "ground_truth" in reward_model:
        return reward_model["ground_truth"]
    if "ground_truth" in row:
        return row["ground_truth"]
    answer = row.get("answer")
    return (hash_answer(answer) or answer) if isinstance(answer, str) else answer


def _read(source: Any, where: str) -> list[Any]:
    if isinstance(source, str) and source.startswith(DATASETS):
        return read_datasets(source)
    if isinstance(source, str) and source.startswith(GYM):
        return read_gym(source)
    if isinstance(source, str | Path):
        return _read_file(Path(source))
    if isinstance(source, list | tuple):
        return list(source)
    columns = getattr(source, "column_names", None)
    if isinstance(columns, dict):
        raise ValueError(
            f"{where} has the splits {sorted(columns)}: pass one of them, such as dataset[{min(columns)!r}]."
        )
    if columns is not None and hasattr(source, "to_list"):
        # A format (torch, numpy) would turn ground truths into arrays.
        return list(source.with_format(None).to_list())
    raise ValueError(
        f"cannot read prompts from {where}: give the path of a .parquet or .jsonl file, a datasets.Dataset that is not "
        "streaming, a list of dicts, or a list of strings."
    )


def _read_file(path: Path) -> list[Any]:
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise ValueError(
            f"{path} {what} (working directory: {Path.cwd()}). Give the path of a .parquet or .jsonl file."
        )
    readers = {".parquet": _read_parquet, ".jsonl": _read_json, ".json": _read_json}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ValueError(f"{path}: unknown kind of file {path.suffix!r}. Use one of {', '.join(readers)}.")
    try:
        return reader(path)
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read: {error}. Check that it is complete and that you may read it."
        ) from error


def _read_parquet(path: Path) -> list[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # One file only: read_table would take the folder names above it for columns.
        return list(pq.ParquetFile(path).read().to_pylist())
    except pa.ArrowException as error:
        raise ValueError(f"{path} is not a readable parquet file: {error}. Write it again.") from error


def _read_json(path: Path) -> list[Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}. Save it as UTF-8.") from error
    if text.lstrip().startswith("["):
        try:
            return list(json.loads(text))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {error.lineno}: broken JSON ({error.msg}).") from error
    rows = []
    # Not splitlines(): it also splits at U+2028 and the like, which JSON strings may hold.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path}, line {number}: broken JSON ({error.msg} at column {error.colno}): {_short(line)}. "
                "Each line must be one whole JSON object."
            ) from error
        except (ValueError, RecursionError) as error:  # a number or nesting beyond what Python reads
            raise ValueError(f"{path}, line {number}: unreadable JSON ({error}): {_short(line)}.") from error
    return rows


def _as_row(item: Any, i: int, where: str) -> Row:
    if isinstance(item, str):
        return {"prompt": item}
    if not isinstance(item, dict):
        raise ValueError(
            f"{where}, row {i} is a {type(item).__name__} ({_short(item)}): each row must be a dict or a string."
        )
    row = dict(item)
    if "prompt" not in row and isinstance(row.get("question"), str) and row["question"].strip():
        row["prompt"] = [{"role": "user", "content": row["question"]}]
    if "prompt" not in row:
        raise ValueError(
            f"{where}, row {i} has no column 'prompt'. Its columns: {sorted(map(str, item))}. Rename one of them."
        )
    if isinstance(row.get("reward_model"), str):
        row["reward_model"] = _parse_reward_model(row["reward_model"], i, where)
    return row


def _parse_reward_model(text: str, i: int, where: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError:
        parsed = None
    if not isinstance(parsed, dict):
        raise ValueError(
            f"{where}, row {i}: reward_model is the string {_short(text)}, which is no JSON object. "
            'Write it as {"ground_truth": ...}, or put the value in a column named ground_truth.'
        )
    return parsed


def _prompt_kind(row: Row, i: int, where: str) -> str:
    prompt = row["prompt"]
    if isinstance(prompt, str):
        if not prompt.strip():
            raise ValueError(f"{where}, row {i}: the prompt is empty ({prompt!r}). Remove the row or fill it.")
        return "a string"
    if not isinstance(prompt, list):
        raise ValueError(
            f"{where}, row {i}: the prompt is a {type(prompt).__name__} ({_short(prompt)}). "
            "It must be a string or a list of chat messages."
        )
    if not prompt:
        raise ValueError(f"{where}, row {i}: the prompt is empty ([]). Remove the row or fill it.")
    for message in prompt:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise ValueError(
                f"{where}, row {i}: {_short(message)} is no chat message. Each must be "
                '{"role": "user", "content": "..."}.'
            )
    if not any(message["content"] for message in prompt):
        raise ValueError(f"{where}, row {i}: the prompt is empty (no message has content). Remove the row or fill it.")
    return "chat messages"


def _check_ground_truths(rows: list[Row], where: str) -> None:
    first: tuple[int, Any] | None = None
    for i, row in enumerate(rows):
        truth = ground_truth(row)
        if truth is None:
            continue
        first = first or (i, truth)
        if _kind(truth) is not _kind(first[1]):
            raise ValueError(
                f"{where} mixes types of ground truth: row {first[0]} has a {type(first[1]).__name__} "
                f"({_short(first[1])}), row {i} a {type(truth).__name__} ({_short(truth)}). Write all in one way."
            )


def _kind(value: Any) -> type:
    return float if isinstance(value, int) and not isinstance(value, bool) else type(value)


def _describe(source: Any) -> str:
    return str(source) if isinstance(source, str | Path) else f"the prompt data ({type(source).__name__})"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
