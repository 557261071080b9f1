"""The table of sample completions, as a person sees it."""

import io
import re

import pytest
import torch

from lightrl.callbacks import SampleTable
from lightrl.callbacks.sample_table import sample_table
from lightrl.types import Rollout
from tests.helpers.tiny import tiny_tokenizer
from tests.helpers.training import quiet_trainer, tiny_data, tiny_module

HEAD = f"  reward  {'prompt':<48}  completion"


def rollouts(rewards: list[float | None]) -> list[Rollout]:
    return [
        Rollout([3, 4 + i], [5], torch.zeros(1), reward=r, text=f"answer\n {i}", truncated=i == 0)
        for i, r in enumerate(rewards)
    ]


def rewards_of(table: str) -> list[str]:
    assert table.splitlines()[0] == HEAD
    return [line[:8].strip() for line in table.splitlines()[1:]]


def test_lines_run_from_worst_to_best() -> None:
    table = sample_table(rollouts([0.5, 1.0, 0.0]), tiny_tokenizer(), 3)
    assert table.splitlines()[1:] == [
        f"   0.000  {'w3 w6':<48}  answer 2",
        f"   0.500  {'w3 w4':<48}  answer 0 ...",
        f"   1.000  {'w3 w5':<48}  answer 1",
    ]


def test_what_a_model_writes_cannot_steer_the_terminal() -> None:
    rollout = Rollout([3], [5], torch.zeros(1), reward=1.0, text="a\x1b[2Jb\x9bc\u202ed \u00e9\u6f22")
    assert sample_table([rollout], tiny_tokenizer(), 1).endswith("a\ufffd[2Jb\ufffdc\ufffdd \u00e9\u6f22")


@pytest.mark.parametrize(
    ("count", "rows", "shown"),
    [(9, 4, [0, 2, 4, 8]), (9, 2, [0, 8]), (9, 1, [8]), (2, 4, [0, 1]), (1, 4, [0]), (3, 4, [0, 1, 2])],
)
def test_worst_and_best_are_there_and_nothing_is_there_twice(count: int, rows: int, shown: list[int]) -> None:
    table = sample_table(rollouts([float(i) for i in range(count)]), tiny_tokenizer(), rows)
    assert rewards_of(table) == [f"{i}.000" for i in shown]


def test_a_rollout_without_reward_shows_a_dash() -> None:
    assert rewards_of(sample_table(rollouts([None, 0.25]), tiny_tokenizer(), 4)) == ["0.250", "-"]


def test_long_texts_are_cut_to_prompt_end_and_completion_beginning() -> None:
    long = Rollout(list(range(3, 32)), [5], torch.zeros(1), reward=1.0, text="x" * 100)
    line = sample_table([long], tiny_tokenizer(), 1).splitlines()[1]
    assert re.fullmatch(r"   1\.000  .{44} w31  x{48}", line)


@pytest.mark.parametrize(("argument", "value"), [("every_n_steps", 0), ("rows", -1)])
def test_bad_arguments(argument: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{argument}={value}"):
        SampleTable(**{argument: value})


def test_tables_of_a_fit() -> None:
    out = io.StringIO()
    table = SampleTable(every_n_steps=2, rows=3, file=out)
    quiet_trainer(max_steps=4, callbacks=[table]).fit(tiny_module(), tiny_data())
    printed = out.getvalue()
    assert re.findall(r"samples at step (\d+)", printed) == ["1", "3"]
    first = printed.split("samples at step 3")[0].strip().split("\n", 1)[1].strip("\n")
    assert len(rewards_of(first)) == 3
    assert all(re.match(r" +\d\.\d{3}  w\d+ ", line) for line in first.splitlines()[1:])


def test_standard_output_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    quiet_trainer(max_steps=1, callbacks=[SampleTable()]).fit(tiny_module(), tiny_data())
    assert f"\nsamples at step 1\n{HEAD}\n" in capsys.readouterr().out
