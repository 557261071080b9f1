"""Rows of prompts: what is read from which source, and what a bad data set says."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lightrl.prompts import ground_truth, load_rows


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_parquet_with_chat_messages_and_reward_model(tmp_path: Path) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": "hi"}], "reward_model": {"ground_truth": "4"}, "level": 1},
        {"prompt": [{"role": "user", "content": "yo"}], "reward_model": {"ground_truth": "5"}, "level": 2},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert load_rows(str(tmp_path / "a.parquet")) == rows
    assert [ground_truth(r) for r in load_rows(tmp_path / "a.parquet")] == ["4", "5"]


def test_a_folder_name_with_equals_sign_is_no_column(tmp_path: Path) -> None:
    folder = tmp_path / "lr=3"
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist([{"prompt": "hi"}]), folder / "a.parquet")
    assert load_rows(folder / "a.parquet") == [{"prompt": "hi"}]


def test_json_lines_keep_unicode_line_separators(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": "a\u2028b", "answer": "#### 4"}, ensure_ascii=False), "", '{"prompt": "c"}']
    rows = load_rows(write(tmp_path / "a.jsonl", "\n".join(lines) + "\n"))
    assert rows == [{"prompt": "a\u2028b", "answer": "#### 4"}, {"prompt": "c"}]
    assert [ground_truth(r) for r in rows] == ["4", None]


def test_json_array_list_of_strings_and_dataset_are_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    assert load_rows(write(tmp_path / "a.json", '[{"prompt": "a"}]')) == [{"prompt": "a"}]
    assert load_rows(["a", "b"]) == [{"prompt": "a"}, {"prompt": "b"}]
    data = datasets.Dataset.from_list([{"prompt": "a", "answer": 3}]).with_format("torch")
    assert load_rows(data) == [{"prompt": "a", "answer": 3}]
    with pytest.raises(ValueError, match=r"splits \['test', 'train'\].*dataset\['test'\]"):
        load_rows(datasets.DatasetDict({"train": data, "test": data}))


def test_reward_model_may_be_a_json_string() -> None:
    (row,) = load_rows([{"prompt": "a", "reward_model": '{"ground_truth": 7}', "answer": 8}])
    assert row["reward_model"] == {"ground_truth": 7}
    assert ground_truth(row) == 7
    assert ground_truth({"ground_truth": 0, "answer": 8}) == 0


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere/x.parquet", r"nowhere/x\.parquet does not exist"),
        (3, r"cannot read prompts from the prompt data \(int\)"),
        ([], "is empty: it has no rows"),
        ([{"query": "a", "answer": 1}], r"row 0 has no column 'prompt'. Its columns: \['answer', 'query'\]"),
        (["a", {"prompt": "b"}, {"text": "c"}], r"row 2 has no column 'prompt'"),
        (
            ["a", {"prompt": [{"role": "user", "content": "b"}]}],
            "mixes prompt types: row 0 has a string, row 1 has chat messages",
        ),
        (["a", {"prompt": 5}], r"row 1: the prompt is a int \(5\)"),
        (
            [{"prompt": "a", "answer": "4"}, {"prompt": "b", "answer": 4}],
            "mixes types of ground truth: row 0 has a str",
        ),
        (["a", 5], r"row 1 is a int \(5\)"),
        (["a", "  "], r"row 1: the prompt is empty \('  '\)"),
        ([{"prompt": []}], r"row 0: the prompt is empty \(\[\]\)"),
        ([{"prompt": [{"role": "user", "content": ""}]}], r"row 0: the prompt is empty \(no message has content\)"),
        ([{"prompt": [{"content": "a"}]}], r"row 0: \{'content': 'a'\} is no chat message"),
        ([{"prompt": "a", "reward_model": "4"}], "row 0: reward_model is the string '4', which is no JSON object"),
    ],
)
def test_bad_rows_say_what_and_where(source: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_rows(source)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"prompt": "a"}\n\n{"prompt": \n', r"a\.jsonl, line 3: broken JSON .*'\{\"prompt\": '"),
        ("a.json", b'[{"prompt": "a"},\n{"prompt" 3}]', r"a\.json, line 2: broken JSON"),
        ("a.jsonl", b'{"prompt": "a"}\n{"answer": 1' + b"0" * 5000 + b"}", r"a\.jsonl, line 2: unreadable JSON"),
        ("a.jsonl", b'{"prompt": "a"}\n{"answer":' + b"[" * 99999, r"a\.jsonl, line 2: unreadable JSON"),
        ("a.jsonl", b"\xff\xfe{}", r"a\.jsonl is not UTF-8"),
        ("a.parquet", b"PAR1 no", r"a\.parquet is not a readable parquet file"),
        ("a.csv", b"prompt", r"a\.csv: unknown kind of file '\.csv'\. Use one of \.parquet, \.jsonl, \.json"),
        ("a.jsonl", b"\n", r"a\.jsonl is empty"),
    ],
)
def test_bad_files_say_what_and_where(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_rows(tmp_path / name)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a folder"):
        load_rows(tmp_path)
