"""Data sources by name: datasets on disk, reasoning-gym tasks, GSM8K's columns."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from lightrl.prompts import ground_truth, gym_rows, load_rows
from lightrl.rewards import RewardSum, gym_score, hash_match, numeric_match
from lightrl.types import Prompt


def as_prompt(row: dict[str, Any]) -> Prompt:
    return Prompt([1], ground_truth=ground_truth(row), columns=row)


# -- GSM8K ------------------------------------------------------------------------------------------------------------


def test_gsm8k_lines_become_chats_with_the_final_answer_as_ground_truth(tmp_path: Path) -> None:
    rows = [
        {"question": "How many are 6 times 7?", "answer": "6 * 7 = <<6*7=42>>42\n#### 42"},
        {"question": "And 1000 more?", "answer": "#### 1,042"},
    ]
    path = tmp_path / "gsm8k.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    loaded = load_rows(str(path))
    assert loaded[0]["prompt"] == [{"role": "user", "content": "How many are 6 times 7?"}]
    assert [ground_truth(row) for row in loaded] == ["42", "1,042"]
    assert loaded[0]["answer"] == rows[0]["answer"], "columns stay as they are"
    assert hash_match("so\n#### 1042", ground_truth(loaded[1])) == numeric_match("1042", ground_truth(loaded[1])) == 1.0


@pytest.mark.parametrize("question", [None, "", " ", 5])
def test_a_question_that_is_none_does_not_become_a_prompt(question: Any) -> None:
    with pytest.raises(ValueError, match="row 0 has no column 'prompt'"):
        load_rows([{"question": question, "answer": "1"}])


# -- datasets ---------------------------------------------------------------------------------------------------------


def test_datasets_by_name_from_disk(tmp_path: Path) -> None:
    rows = [{"prompt": f"w{i}", "answer": str(i)} for i in range(4)]
    both = datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(rows), "test": datasets.Dataset.from_list(rows[:1])}
    )
    both.save_to_disk(tmp_path / "saved")
    assert load_rows(f"datasets:{tmp_path}/saved:train") == rows
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert load_rows(f"datasets:{tmp_path}/plain:train[:2]") == rows[:2]


@pytest.mark.parametrize("spec", ["datasets:", "datasets:name", "datasets:a:b:c:d", "datasets::train"])
def test_a_name_of_another_form_is_shown_the_right_one(spec: str) -> None:
    with pytest.raises(ValueError, match="write 'datasets:NAME:SPLIT' or 'datasets:NAME:CONFIG:SPLIT'"):
        load_rows(spec)


def test_data_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'datasets:.*nowhere:train' cannot be loaded: "):
        load_rows(f"datasets:{tmp_path}/nowhere:train")


# -- reasoning-gym ----------------------------------------------------------------------------------------------------


def test_gym_rows_are_reproducible_and_scored_by_their_own_task() -> None:
    rows = load_rows("gym:chain_sum?size=5&seed=3&min_terms=2&max_terms=2")
    assert rows == load_rows("gym:chain_sum?size=5&seed=3&min_terms=2&max_terms=2")
    assert rows == gym_rows("chain_sum", size=5, seed=3, min_terms=2, max_terms=2)
    assert rows != gym_rows("chain_sum", size=5, seed=4, min_terms=2, max_terms=2)
    scorer = RewardSum(gym_score)
    right = [f"Well. <answer> {row['answer']} </answer>" for row in rows]
    for texts, reward in ((right, 1.0), ([row["answer"] for row in rows], 1.0), (["<answer></answer>"] * 5, 0.0)):
        assert [s.total for s in scorer.score(texts, [as_prompt(row) for row in rows])] == [reward] * 5


@pytest.mark.parametrize("task", ["countdown", "letter_counting", "number_sorting", "sudoku", "knights_knaves"])
def test_gym_tasks_of_other_kinds_score_their_own_answers(task: str) -> None:
    """Some accept what differs from the reference, some read their settings or the problem's metadata."""
    rows = gym_rows(task, size=2, seed=0)
    scorer = RewardSum(gym_score)
    prompts = [as_prompt(row) for row in rows]
    assert [s.total for s in scorer.score([str(row["answer"]) for row in rows], prompts)] == [1.0, 1.0]
    assert all((s.total or 0.0) < 1.0 for s in scorer.score(["no idea"] * 2, prompts))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gym:chain_sam", "no task 'chain_sam': did you mean one of .*chain_sum"),
        ("gym:chain_sum?colour=3", "'chain_sum' does not take .*colour"),
        ("gym:chain_sum?min_terms=9&max_terms=2", "'chain_sum' does not take .*min_terms"),
    ],
)
def test_bad_gym_names_are_named(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_rows(spec)


@pytest.mark.parametrize(("spec", "extra"), [("gym:gcd", "gym"), ("datasets:a:b", "datasets")])
def test_a_missing_package_is_named_with_its_extra(spec: str, extra: str, monkeypatch: Any) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(ValueError, match=rf"pip install 'lightrl-trainer\[{extra}\]'"):
        load_rows(spec)
