"""The benchmark harness: discovery, the last line, the exit status."""

import subprocess
import sys
from pathlib import Path

import pytest

import benchmarks
from benchmarks import __main__ as harness
from benchmarks import demo

GOOD = '''
"""Counts to two."""
from benchmarks import Result
def main():
    return Result(figure="2 items", bar=">= 2", ok=True, table="items\\n2")
'''
SHORT = GOOD.replace("2 items", "1 item").replace("True", "False")
BROKEN = GOOD.replace("return Result", "raise ValueError('boom') or Result")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder that takes the place of the benchmarks' own."""
    monkeypatch.setattr(benchmarks, "__path__", [str(tmp_path)])
    yield tmp_path
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(f"benchmarks.{path.stem}", None)
        vars(benchmarks).pop(path.stem, None)


def add(folder: Path, name: str, source: str) -> None:
    (folder / f"{name}.py").write_text(source.lstrip())


def test_one_benchmark_prints_its_table_then_its_verdict(folder, capsys):
    add(folder, "fake_good", GOOD)
    assert harness.main(["fake_good"]) == 0
    assert capsys.readouterr().out.splitlines() == ["items", "2", "fake_good: ok 2 items (bar >= 2)"]


def test_short_exits_with_1(folder, capsys):
    add(folder, "fake_short", SHORT)
    assert harness.main(["fake_short"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "fake_short: short 1 item (bar >= 2)"


def test_a_crash_is_short_and_does_not_hide_the_others(folder, capsys):
    add(folder, "fake_a_broken", BROKEN)
    add(folder, "fake_b_good", GOOD)
    assert harness.main([]) == 1
    out = capsys.readouterr().out
    assert "ValueError: boom" in out
    assert "fake_a_broken: short no figure, ValueError (bar it runs)\n" in out
    assert out.endswith("fake_b_good: ok 2 items (bar >= 2)\n")


def test_what_the_machine_lacks_is_skipped_among_all_and_an_error_by_name(folder, capsys, monkeypatch):
    monkeypatch.setitem(harness.NEEDS, "gpu", lambda: False)
    monkeypatch.setitem(harness.NEEDS, "vllm", lambda: True)
    add(folder, "fake_gpu", GOOD + 'needs = "gpu vllm"\n')
    assert harness.main([]) == 0
    assert capsys.readouterr().out == "fake_gpu: skipped, needs gpu\n"
    with pytest.raises(SystemExit, match="2"):
        harness.main(["fake_gpu"])
    assert "fake_gpu needs gpu, which this machine lacks" in capsys.readouterr().err


def test_list_gives_one_line_each_and_leaves_helpers_out(folder, capsys):
    add(folder, "fake_good", GOOD)
    add(folder, "_helper", GOOD)
    assert harness.main(["--list"]) == 0
    assert capsys.readouterr().out == "fake_good: Counts to two.\n"


def test_unknown_name_suggests_the_nearest(folder, capsys):
    add(folder, "weight_sync", GOOD)
    add(folder, "packing", GOOD)
    with pytest.raises(SystemExit, match="2"):
        harness.main(["wieght-sync"])
    assert "no benchmark 'wieght-sync'; did you mean 'weight_sync'?" in capsys.readouterr().err


def test_from_the_command_line():
    root = Path(benchmarks.__file__).parent.parent
    done = subprocess.run([sys.executable, "-m", "benchmarks", "--list"], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0
    assert f"demo: {demo.__doc__.splitlines()[0]}\n" in done.stdout


DEMO_OUTPUT = "held-out pass@1 before training: 0.031\nstep 1\ntraining took {seconds} s\nheld-out pass@1: {after}\n"


@pytest.mark.parametrize(
    ("after", "seconds", "ok"), [("0.95", "179.9", True), ("0.949", "60", False), ("1.0", "180", False)]
)
def test_demo_bars(after, seconds, ok):
    result = demo.judge(demo.parse(DEMO_OUTPUT.format(after=after, seconds=seconds)))
    assert result.ok is ok
    assert result.bar == "< 0.2 -> >= 0.95 in < 180 s"


def test_demo_wants_its_figure_on_the_last_line():
    with pytest.raises(RuntimeError, match="no line matches"):
        demo.parse(DEMO_OUTPUT.format(after="1.0", seconds="60") + "one more line\n")


def test_algorithms_bar_is_the_worst_of_them():
    from benchmarks import algorithms

    rows = [
        {"algorithm": name, "steps": 60, "seconds": 9.6, "before": 0.1, "pass@1": after, "curve": ([10], [after])}
        for name, after in (("GRPO", 0.95), ("DAPO", 0.8))
    ]
    assert algorithms.judge(rows).ok
    rows[1]["pass@1"] = 0.799
    result = algorithms.judge(rows)
    assert not result.ok
    assert "0.799 (DAPO, 2 algorithms)" in result.figure
    assert "| GRPO | 60 | 10 | 0.100 | 0.950 |" in algorithms.markdown(rows, "colocated_hf")


def test_every_algorithm_is_measured():
    from benchmarks.algorithms import NAMES
    from lightrl import algorithms

    assert sorted(NAMES) == sorted(algorithms.__all__)


def test_plan_bars():
    from benchmarks import plan
    from lightrl.planning import StepSeconds, make_plan

    faster = make_plan(StepSeconds(generate=1.0, train=0.5, fixed_share=0.5), devices=2, max_staleness=2)
    assert min(faster.splits) == pytest.approx(7 / 6)  # 0.5 x 2 of work and 0.5 / 3
    good = {"name": "a tail", "plan": faster, "turns": 1.5, "asynchronous": 1.3}
    assert plan.judge([good]).ok
    assert not plan.judge([good | {"asynchronous": 1.0}]).ok, "faster than the bound"
    assert not plan.judge([good | {"asynchronous": 1.9}]).ok, "far from it, and the verdict was wrong"
    result = plan.judge([good, good | {"asynchronous": 1.7}])
    assert "1 of 2 verdicts right" in result.figure
    assert not result.ok
