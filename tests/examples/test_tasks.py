"""The examples of rewards, prompts and environments: short runs of the programs as they are."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.calculator import run as calculator
from lightrl.environments import ToolUse

SHORT = {"gym_task": [], "weighted_rewards": [], "calculator": ["--warm-up-steps", "2"]}
FOLDER = Path(calculator.__file__).parent.parent


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORT)
def test_each_runs_and_draws_its_curve(name: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    options = ["--strategy", "colocated_hf", "--max-steps", "1", "--out", str(tmp_path), *SHORT[name]]
    monkeypatch.setattr(sys, "argv", ["run", *options])
    importlib.import_module(f"examples.{name}.run").main()
    said = capsys.readouterr().out
    assert "held-out reward: " in said
    assert list(tmp_path.rglob("reward.png"))


@pytest.mark.parametrize("name", SHORT)
def test_each_is_short_and_explained(name: str) -> None:
    lines = sum(len(path.read_text().splitlines()) for path in (FOLDER / name).glob("*.py"))
    assert lines < 150
    assert "(reward.png)" in (FOLDER / name / "README.md").read_text()
    assert (FOLDER / name / "reward.png").is_file()


def test_the_calculators_call_is_what_its_template_writes() -> None:
    words = [*calculator.VOCABULARY, *calculator.CALL.split()]
    use = ToolUse([calculator.multiply])
    use.setup(calculator.make_tokenizer(words, calculator.CHAT_TEMPLATE))
    assert use.parse is not None
    (call,) = use.parse(calculator.CALL % (7, 8))
    assert (call.name, call.arguments) == ("multiply", {"a": 7, "b": 8})
