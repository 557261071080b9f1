"""Every call has a time limit that returns, whatever the call does, and leaves the scorer as able as before."""

import asyncio
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from lightrl.rewards import RewardSum
from lightrl.types import Prompt
from tests.rewards import bad_rewards

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:reward .* failed")]


async def spin_async(completion: str) -> float:
    return bad_rewards.spin(completion)


async def sleep_async(completion: str) -> float:
    await asyncio.sleep(3600 if completion == "bad" else 0)
    return 1.0


async def stubborn_async(completion: str) -> float:
    while completion == "bad":
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            continue
    return 1.0


def spin_and_catch(completion: str) -> float:
    while completion == "bad":
        try:
            sum(range(100))
        except Exception:
            continue
    return 1.0


HANGING = [bad_rewards.spin, bad_rewards.sleep, spin_and_catch, spin_async, sleep_async, stubborn_async]


def totals(scorer: RewardSum, texts: list[str]) -> list[float | None]:
    return [score.total for score in scorer.score(texts, [Prompt([1], index=i) for i in range(len(texts))])]


@pytest.mark.parametrize("reward", HANGING)
def test_b24_a_hung_call_costs_only_itself(reward: Any) -> None:
    scorer = RewardSum(reward, timeout=0.5, workers=2, on_error="exclude")
    start = time.monotonic()
    assert totals(scorer, ["good", "bad", "good"]) == [1.0, None, 1.0]
    assert 0.5 <= time.monotonic() - start < 2.5
    assert list(scorer.failures.values()) == [1]
    start = time.monotonic()
    assert totals(scorer, ["good"] * 50) == [1.0] * 50
    assert time.monotonic() - start < 0.4, "capacity has not recovered"
    scorer.close()


@pytest.mark.parametrize("reward", HANGING)
def test_b24_a_hung_call_is_reported_under_raise(reward: Any) -> None:
    scorer = RewardSum(reward, timeout=0.3, workers=2)
    start = time.monotonic()
    with pytest.raises(
        RuntimeError, match=r"failed on prompt row 1, completion 'bad': it did not return within 0\.3 s"
    ):
        totals(scorer, ["good", "bad", "good"])
    assert time.monotonic() - start < 2.0
    scorer.close()


@pytest.mark.slow
@pytest.mark.parametrize("reward", [bad_rewards.spin, bad_rewards.sleep])
def test_b24_many_hung_calls_do_not_use_up_the_workers(reward: Any) -> None:
    scorer = RewardSum(reward, timeout=0.2, workers=2, on_error="exclude")
    start = time.monotonic()
    assert totals(scorer, ["bad"] * 20 + ["good"]) == [None] * 20 + [1.0]
    assert time.monotonic() - start < 8.0
    assert list(scorer.failures.values()) == [20]


def test_b24_a_busy_loop_is_ended_not_only_left_behind() -> None:
    before = threading.active_count()
    scorer = RewardSum(spin_and_catch, timeout=0.2, workers=4, on_error="exclude")
    totals(scorer, ["bad"] * 4)
    deadline = time.monotonic() + 2
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before


def test_b24_the_first_hung_call_stops_the_others_under_raise() -> None:
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="did not return"):
        totals(RewardSum(bad_rewards.sleep, timeout=0.3, workers=1), ["bad"] * 20)
    assert time.monotonic() - start < 1.5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["spin", "sleep"])
def test_b24_the_interpreter_exits_after_a_hung_call(name: str) -> None:
    code = f"""
import time, warnings
warnings.simplefilter("ignore")
from lightrl.rewards import RewardSum
from lightrl.types import Prompt
from tests.rewards.bad_rewards import {name}
async def hangs(completion):
    return {name}(completion)
scorer = RewardSum([{name}, hangs], timeout=0.3, workers=2, on_error="exclude")
print([s.total for s in scorer.score(["bad", "good"], [Prompt([1])] * 2)], time.time())
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True)
    ended = time.time()
    result, said = done.stdout.rsplit(" ", 1)
    assert result == "[None, 2.0]"
    assert ended - float(said) < 5.0
    assert done.stderr == ""


def test_async_calls_run_at_the_same_time() -> None:
    running = most = 0

    async def judge(completion: str) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.05)
        running -= 1
        return 1.0

    scorer = RewardSum(judge, max_async_calls=16)
    start = time.monotonic()
    assert totals(scorer, ["a"] * 64) == [1.0] * 64
    assert most == 16
    assert time.monotonic() - start < 1.0
    scorer.close()


def test_async_calls_share_one_loop_over_steps() -> None:
    loops = set()

    async def judge(completion: str) -> float:
        loops.add(asyncio.get_running_loop())
        return 1.0

    scorer = RewardSum(judge)
    totals(scorer, ["a", "b"])
    totals(scorer, ["a"])
    assert len(loops) == 1
    scorer.close()


def test_waiting_for_a_worker_does_not_count() -> None:
    scorer = RewardSum(lambda completion: time.sleep(0.2) or 1.0, timeout=0.4, workers=1)
    assert totals(scorer, ["a"] * 4) == [1.0] * 4


def test_trivial_rewards_are_cheap() -> None:
    scorer = RewardSum(lambda completion, ground_truth: float(completion == ground_truth))
    totals(scorer, ["a"] * 100)
    start = time.monotonic()
    totals(scorer, ["a"] * 5000)
    assert time.monotonic() - start < 1.5


def test_closing_ends_a_call_that_another_thread_waits_for() -> None:
    """Rollouts ahead of training are scored when a run ends; the thread that scores them must not wait for ever."""
    scorer, errors = RewardSum(sleep_async), []

    def score() -> None:
        try:
            scorer.score(["bad"], [Prompt([1])])
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=score, daemon=True)
    thread.start()
    time.sleep(0.5)
    scorer.close()
    thread.join(5.0)
    assert not thread.is_alive()
    assert "rewards were closed while this call ran" in errors[0]
    assert scorer.score(["good"], [Prompt([1])])[0].total == 1.0
