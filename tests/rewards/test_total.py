"""The sum of rewards: which arguments a function gets, what it may return, and what an error says."""

import functools
import warnings
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from lightrl.rewards import RewardSum
from lightrl.types import Prompt
from tests.rewards import bad_rewards

NAN, INF = float("nan"), float("inf")


def prompts(n: int, **columns: Any) -> list[Prompt]:
    return [
        Prompt([1], ground_truth=f"gold{i}", columns={"prompt": f"p{i}", "level": i} | columns, index=10 + i)
        for i in range(n)
    ]


def values(rewards: Any, texts: list[str], **arguments: Any) -> list[float | None]:
    scorer = RewardSum(rewards, **arguments)
    try:
        return [score.total for score in scorer.score(texts, prompts(len(texts)))]
    finally:
        scorer.close()


# --- arguments


def test_a_plain_function_gets_completion_and_ground_truth_by_position() -> None:
    seen: list[tuple[Any, ...]] = []
    assert values(lambda text, truth: seen.append((text, truth)), ["a"]) == [None]
    assert seen == [("a", "gold0")]


def test_columns_go_by_name_and_only_if_wanted() -> None:
    def some(completion: str, level: int, missing: int = 7) -> float:
        return level * 10 + missing

    def every(completion: str, ground_truth: str, **columns: Any) -> float:
        assert columns == {"prompt": "p0", "level": 0, "completion_ids": [5]}
        return 1.0

    assert values(some, ["a", "b"]) == [7.0, 17.0]
    assert RewardSum(every).score(["a"], prompts(1), [[5]])[0].total == 1.0


def test_a_parameter_that_is_no_column_is_refused() -> None:
    def wants(completion: str, ground_truth: str, colour: str) -> float:
        return 1.0

    with pytest.raises(
        ValueError, match=r"'wants' wants 'colour', which is no column. There are: \['ground_truth', 'level'"
    ):
        values(wants, ["a"], on_error="exclude")


def test_a_batched_function_is_called_once_with_lists() -> None:
    calls = []

    def batched(prompts: list[str], completions: list[str], ground_truths: list[str], level: list[int]) -> Any:
        calls.append((prompts, completions, ground_truths, level))
        return np.array([1.0, 2.0])

    assert values(batched, ["a", "b"]) == [1.0, 2.0]
    assert calls == [(["p0", "p1"], ["a", "b"], ["gold0", "gold1"], [0, 1])]


def test_every_kind_of_callable() -> None:
    async def slow(completion: str) -> float:
        return 1.0

    async def batched(completions: list[str], **columns: Any) -> list[float]:
        return [10.0 for _ in completions]

    class Plain:
        def __call__(self, completion: str) -> float:
            return 100.0

    part = functools.partial(lambda completion, ground_truth, by: by, by=1000.0)
    rewards = [slow, batched, Plain(), part, "tests.rewards.bad_rewards:grader", "tests.rewards.bad_rewards.sleep"]
    scorer = RewardSum(rewards)
    assert [term.name for term in scorer.terms] == ["slow", "batched", "Plain", "lambda", "Grader", "sleep"]
    assert [s.total for s in scorer.score(["aa", "aaa"], prompts(2))] == [1114.0, 1115.0]
    scorer.close()


def test_names_are_unique() -> None:
    scorer = RewardSum([lambda c: 1, lambda c: 2, lambda c: 3])
    assert scorer.score(["a"], prompts(1))[0].terms == {"lambda": 1.0, "lambda_2": 2.0, "lambda_3": 3.0}


# --- the sum


def test_b01_a_term_that_abstains_is_skipped_in_the_sum() -> None:
    def first(completions: list[str]) -> list[float | None]:
        return [1, 1, None, 0]

    def second(completions: list[str]) -> list[float | None]:
        return [None] * 4

    scores = RewardSum([first, second], weights=[1.0, 0.5]).score(["a", "b", "c", "d"], prompts(4))
    assert [s.total for s in scores] == [1.0, 1.0, None, 0.0]
    assert scores[0].terms == {"first": 1.0, "second": None}


def test_weights_apply_to_the_total_only() -> None:
    scores = RewardSum({"good": (lambda c: 2.0, 0.5), "long": (lambda c: 3.0, -1), "one": lambda c: 1}).score(
        ["a"], prompts(1)
    )
    assert scores[0].total == 2.0 * 0.5 - 3.0 + 1
    assert scores[0].terms == {"good": 2.0, "long": 3.0, "one": 1.0}


def test_nothing_to_score() -> None:
    assert RewardSum(lambda c: 1.0).score([], []) == []


@pytest.mark.parametrize(
    ("rewards", "arguments", "message"),
    [
        ([], {}, "there is no reward"),
        (3, {}, "3 is no reward"),
        (bad_rewards.Grader, {}, "the class Grader is no reward"),
        ("nothing", {}, "'nothing' is no import path"),
        ("no_such_package.rewards:f", {}, "there is no module 'no_such_package'"),
        ("tests.rewards.nowhere:f", {}, r"there is no module 'tests\.rewards\.nowhere'"),
        ("tests.rewards.bad_rewards:f", {}, "'tests.rewards.bad_rewards' has no 'f'"),
        ("lightrl.rewards.exact_mach", {}, "'lightrl.rewards' has no 'exact_mach'; did you mean 'exact_match'?"),
        ({"a": (len, NAN)}, {}, "the weight of reward 'a' is nan"),
        ({"a": (len, "2")}, {}, "the weight of reward 'a' is '2'"),
        ({"a": (len, 2.0)}, {"weights": [1.0]}, "given twice"),
        (lambda: 1.0, {}, "takes no completion"),
        (len, {"timeout": 0}, "timeout=0"),
        (len, {"workers": 0}, "workers=0"),
        (len, {"on_error": "ignore"}, "on_error='ignore'"),
    ],
)
def test_bad_construction(rewards: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RewardSum(rewards, **arguments)


def test_lengths_of_the_input_must_agree() -> None:
    with pytest.raises(ValueError, match="2 completions, 1 prompts"):
        RewardSum(len).score(["a", "b"], prompts(1))
    with pytest.raises(ValueError, match="1 completions, 1 prompts and 2 lists"):
        RewardSum(len).score(["a"], prompts(1), [[1], [2]])


# --- what comes back


@pytest.mark.parametrize(
    ("returned", "received"),
    [
        ([1.0], "1 values"),
        ([1.0] * 5, "5 values"),
        (1.0, "a float: 1.0"),
        ((x for x in [1.0] * 4), "a generator"),
        (np.ones((4, 1)), r"a ndarray of shape \(4, 1\)"),
        (torch.ones(4, 1), r"a Tensor of shape \(4, 1\)"),
        ("1111", "a str: '1111'"),
        (None, "a NoneType"),
        ({"a": 1}, "a dict"),
    ],
)
@pytest.mark.parametrize("on_error", ["raise", "exclude"])
def test_b21_wrong_number_of_results(returned: Any, received: str, on_error: str) -> None:
    def grade(completions: list[str], **columns: Any) -> Any:
        return returned

    message = f"reward 'grade' must return a list of 4 values, one for each completion, and returned {received}.*'text'"
    with pytest.raises(ValueError, match=message):
        values(grade, ["text", "b", "c", "d"], on_error=on_error)


@pytest.mark.parametrize(
    ("returned", "received"),
    [
        ("0.5", "a str: '0.5'"),
        ([0.5], r"a list: \[0.5\]"),
        (np.ones(1), r"a ndarray of shape \(1,\)"),
        (np.ones(()).astype(str), "a str"),
        (1j, "a complex"),
        (NAN, "nan"),
        (-INF, "-inf"),
        (10**400, "a number beyond what a float holds"),
        (torch.tensor(INF), "inf"),
    ],
)
def test_b21_wrong_type_of_result(returned: Any, received: str) -> None:
    def grade(completion: str) -> Any:
        return returned if completion == "odd" else 1.0

    message = (
        f"'grade' must return a finite number or None and returned {received}.* on prompt row 11, completion 'odd'"
    )
    with pytest.raises(ValueError, match=message):
        values(grade, ["fine", "odd"])
    with pytest.raises(ValueError, match=message):
        values({"grade": lambda completions: [1.0, returned]}, ["fine", "odd"])


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ([True, False, None, 2], [1.0, 0.0, None, 2.0]),
        ((1, 2, 3, 4), [1.0, 2.0, 3.0, 4.0]),
        (np.array([1, 0, 0, 1], bool), [1.0, 0.0, 0.0, 1.0]),
        (torch.tensor([0.5, 1, 2, 3]), [0.5, 1.0, 2.0, 3.0]),
        ([np.float32(0.5), np.bool_(True), torch.tensor(2), Fraction(1, 4)], [0.5, 1.0, 2.0, 0.25]),
    ],
)
def test_b21_good_results(returned: Any, expected: list[float | None]) -> None:
    total = values(lambda completions: returned, ["a", "b", "c", "d"])
    assert total == expected
    assert all(v is None or type(v) is float for v in total)


def test_b21_as_many_weights_as_functions() -> None:
    functions: list[Callable[..., float]] = [lambda c: 1.0, lambda c: 10.0, lambda c: 100.0]
    with pytest.raises(ValueError, match=r"3 rewards and 1 weights \(\[1.0\]\)"):
        RewardSum(functions, weights=[1.0])
    assert values(functions, ["a"]) == [111.0]


# --- errors


def fails(completion: str) -> float:
    return 1 / completion.count("x")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_exception_is_raised_with_its_input_and_cause(asynchronous: bool) -> None:
    async def fails_async(completion: str) -> float:
        return fails(completion)

    reward = {"fails": fails_async if asynchronous else fails}
    with pytest.raises(
        RuntimeError, match=r"'fails' failed on prompt row 11, completion 'y+\.\.\.y+': ZeroDiv"
    ) as caught:
        values(reward, ["x", "y" * 1000])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, ValueError])
def test_a_reward_that_exits_is_an_error_like_any_other(error: type[BaseException]) -> None:
    def leaves(completion: str) -> float:
        raise error

    async def leaves_async(completion: str) -> float:
        raise error

    for reward in (leaves, leaves_async):
        with pytest.raises(RuntimeError, match=error.__name__):
            values(reward, ["a"])


def test_exclude_leaves_out_what_has_but_a_part_of_its_terms_warns_once_and_counts() -> None:
    scorer = RewardSum([fails, len], on_error="exclude")
    with pytest.warns(
        UserWarning, match="'fails' failed on prompt row 10, completion 'a': ZeroDivisionError"
    ) as caught:
        scores = scorer.score(["a", "x", "b"], prompts(3))
    assert len([c for c in caught if c.category is UserWarning]) == 1
    assert [s.terms for s in scores] == [
        {"fails": None, "len": 1.0},
        {"fails": 1.0, "len": 1.0},
        {"fails": None, "len": 1.0},
    ]
    assert [s.total for s in scores] == [None, 2.0, None]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scorer.score(["a"], prompts(1))
    assert scorer.failures == {"fails": 3, "len": 0}


def test_exclude_takes_nan_for_a_failure() -> None:
    with pytest.warns(UserWarning, match="returned nan"):
        assert values(lambda c: NAN if c == "a" else 1.0, ["a", "b"], on_error="exclude") == [None, 1.0]


def test_exclude_costs_a_batch_its_term() -> None:
    def batched(completions: list[str]) -> list[float]:
        raise OSError("gone")

    with pytest.warns(UserWarning, match=r"row 10, completion 'a' \(and 1 more of its batch\): OSError: gone"):
        assert values(batched, ["a", "b"], on_error="exclude") == [None, None]
