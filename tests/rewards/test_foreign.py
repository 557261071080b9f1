"""Functions written for verl and TRL, as they are."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lightrl.prompts import ground_truth, load_rows
from lightrl.rewards import RewardSum
from lightrl.types import Prompt
from tests.helpers.environments import Rollouts, chat_tokenizer
from tests.helpers.training import quiet_trainer, tiny_data, tiny_module

COMPUTE_SCORE = '''
"""A reward file in verl's form."""
import dataclasses
import re


@dataclasses.dataclass
class Found:
    words: list


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "words/even", data_source
    found = Found(re.findall(r"w(\\d+)", solution_str))
    if extra_info["index"] % 2:
        return {"score": float(len(found.words)), "acc": False}
    return float(ground_truth in found.words)
'''


def verl_rows(n: int = 6) -> list[dict[str, Any]]:
    return [
        {
            "data_source": "words/even",
            "prompt": [{"role": "user", "content": f"w{6 + i}"}],
            "ability": "words",
            "reward_model": {"style": "rule", "ground_truth": str(6 + i)},
            "extra_info": {"split": "train", "index": i},
        }
        for i in range(n)
    ]


@pytest.fixture
def verl(tmp_path: Path) -> tuple[str, str]:
    """The paths of a parquet file and of a function in a file."""
    pq.write_table(pa.Table.from_pylist(verl_rows()), tmp_path / "train.parquet")
    (tmp_path / "score.py").write_text(COMPUTE_SCORE)
    return str(tmp_path / "train.parquet"), f"{tmp_path}/score.py:compute_score"


def test_verl_data_and_function_work_unchanged_in_a_fit(verl: tuple[str, str]) -> None:
    watch = Rollouts()
    data = tiny_data(verl[0], verl[1], tokenizer=chat_tokenizer(), prompts_per_step=6, max_completion_tokens=6)
    quiet_trainer(callbacks=[watch], max_steps=2).fit(tiny_module(), data)
    for rollout in (r for step in watch.trained for r in step):
        i = rollout.prompt_ids[1] - 6
        words = [word[1:] for word in rollout.text.split() if word[1:].isdigit()]
        assert rollout.reward == (len(words) if i % 2 else float(str(6 + i) in words))
    assert len({r.reward for r in watch.trained[0]}) > 1


def test_verl_functions_without_extra_info_in_the_data() -> None:
    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
        return float(solution_str == ground_truth and extra_info == {} and data_source == "a")

    prompts = [Prompt([1], ground_truth="4", columns={"data_source": "a"})]
    assert RewardSum(compute_score).score(["4"], prompts)[0].total == 1.0
    with pytest.raises(ValueError, match="'compute_score' wants 'data_source', which is no column"):
        RewardSum(compute_score).score(["4"], [Prompt([1])])


def accuracy(completions: Any, solution: list[str], **kwargs: Any) -> list[float | None]:
    """In TRL's form for chats: each completion is a list of messages."""
    contents = [completion[0]["content"] for completion in completions]
    return [float(answer in content.split()) for content, answer in zip(contents, solution, strict=True)]


def share(prompts: Any, completions: Any, completion_ids: Any, **kwargs: Any) -> list[float]:
    assert all(prompt[-1]["role"] == "user" for prompt in prompts)
    assert kwargs["solution"][0].startswith("w")
    return [len(ids) / 10 for ids in completion_ids]


def test_trl_functions_work_unchanged_in_a_fit() -> None:
    rows = [{"prompt": [{"role": "user", "content": f"w{6 + i}"}], "solution": f"w{7 + i}"} for i in range(6)]
    watch = Rollouts()
    data = tiny_data(rows, [accuracy, share], tokenizer=chat_tokenizer(), max_completion_tokens=6)
    quiet_trainer(callbacks=[watch], max_steps=2).fit(tiny_module(), data)
    for rollout in (r for step in watch.trained for r in step):
        said = f"w{rollout.prompt_ids[1] + 1}" in rollout.text.split()
        assert rollout.reward_terms == {"accuracy": float(said), "share": len(rollout.completion_ids) / 10}


def test_trl_functions_get_text_where_prompts_are_text() -> None:
    def length(completions: list[str], **kwargs: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    assert RewardSum(length).score(["abc"], [Prompt([1], columns={"prompt": "a"})])[0].total == 3.0


def test_verl_parquet_columns_are_kept(verl: tuple[str, str]) -> None:
    rows = load_rows(verl[0])
    assert rows == verl_rows()
    assert [ground_truth(row) for row in rows[:2]] == ["6", "7"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("{}/none.py:f", "there is no file"),
        ("{}/score.py:f", "has no 'f'"),
        ("{}/score.py", "write 'package.module:function' or 'file.py:function'"),
    ],
)
def test_files_that_are_not_there_are_named(verl: tuple[str, str], path: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RewardSum(path.format(Path(verl[0]).parent))
