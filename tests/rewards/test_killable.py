"""Rewards in child processes: called with their own arguments, killed when overdue, replaced, and gone at the end."""

import time
from typing import Any

import psutil
import pytest

from lightrl.rewards import KillableReward, RewardSum
from lightrl.rewards.pool import RewardTimeoutError
from lightrl.types import Prompt
from tests.rewards.child_rewards import backtracks, fails, leaves, level, unpicklable


def children() -> list[psutil.Process]:
    return [c for c in psutil.Process().children() if any("child.py" in part for part in c.cmdline())]


def test_b24_a_call_that_holds_the_lock_is_killed_and_the_next_one_works() -> None:
    reward = KillableReward(backtracks, timeout=0.5)
    assert reward("ab", "") == 1.0
    first = children()
    started = time.perf_counter()
    with pytest.raises(RewardTimeoutError, match=r"within 0.5 s, and its process was killed"):
        reward("a" * 40, "")
    assert time.perf_counter() - started < 5
    assert children() == []
    assert reward("aab", "") == 1.0
    assert children() != first
    reward.close()
    assert children() == []


@pytest.mark.slow
def test_b24_hung_calls_cost_only_themselves_in_a_sum() -> None:
    scorer = RewardSum(
        {"form": KillableReward(backtracks, timeout=1.0), "level": KillableReward(level)}, workers=2, on_error="exclude"
    )
    texts = ["ab", "a" * 40, "b", "a" * 41, "aab"]
    with pytest.warns(UserWarning, match="'form' failed .* its process was killed"):
        found = scorer.score(texts, [Prompt([1], ground_truth="", columns={"level": i}) for i in range(5)])
    assert [s.terms["form"] for s in found] == [1.0, None, 0.0, None, 1.0]
    assert [s.terms["level"] for s in found] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert 0 < len(children()) <= 4, "one for each thread and reward, at most"
    scorer.close()
    assert children() == []


def test_what_it_raises_comes_back_with_the_childs_traceback() -> None:
    reward = KillableReward(fails)
    with pytest.raises(RuntimeError, match=r"(?s)in the child process: ZeroDivisionError: boom.*line \d+, in fails"):
        reward("a")
    assert len(children()) == 1, "it goes on serving"
    reward.close()


def test_a_function_that_ends_its_process_is_named() -> None:
    with pytest.raises(RuntimeError, match="its process ended with exit status 3"):
        KillableReward(leaves)("a")


def test_a_result_that_cannot_be_copied_is_an_error_and_no_hang() -> None:
    reward = KillableReward(unpicklable)
    with pytest.raises(RuntimeError, match=r"in the child process: .*pickle"):
        reward("a")
    reward.close()


def test_what_another_process_cannot_find_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="cannot be found again by another process"):
        KillableReward(lambda completion: 1.0)
    with pytest.raises(ValueError, match=r"timeout=0: must be more than 0"):
        KillableReward(fails, timeout=0)
    with pytest.raises(ValueError, match="there is no module"):
        KillableReward("tests.nowhere:f")


def test_by_import_path_and_file(tmp_path: Any) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def reward(completion, ground_truth):\n    return len(completion)\n")
    for path in (f"{file}:reward", "builtins.len"):
        reward = KillableReward(path)
        assert reward("abc", *["x"] * ("mine" in path)) == 3
        reward.close()
