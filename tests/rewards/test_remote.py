"""Rewards that a server computes: what is sent, tried again, given up and kept secret."""

import copy
import logging
import pickle
import threading
import time
import traceback
from typing import Any

import pytest

from lightrl.rewards import HTTPReward, Judge, RewardSum
from lightrl.types import Prompt
from tests.helpers.server import serving

PROMPTS = [Prompt([1], ground_truth="4", columns={"prompt": f"2 + {i}", "level": i}, index=i) for i in range(3)]


def totals(reward: Any, texts: list[str], **args: Any) -> list[float | None]:
    scorer = RewardSum(reward, **args)
    try:
        return [s.total for s in scorer.score(texts, PROMPTS[: len(texts)])]
    finally:
        scorer.close()


def chat(said: str) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": said}}]}


def test_a_server_gets_completion_ground_truth_and_the_columns_asked_for() -> None:
    with serving(lambda body: (200, {"score": len(body["completion"]) + body["level"]})) as server:
        assert totals(HTTPReward(server.url, columns=["level"]), ["a", "bb \u2028 \U0001f600", ""]) == [1, 7, 2]
    sent = sorted(server.requests, key=lambda body: body["level"])
    assert sent[0] == {"completion": "a", "ground_truth": "4", "level": 0}


def test_b24_passing_errors_are_tried_again_and_lasting_ones_are_not() -> None:
    left = [503, 429]
    with serving(lambda body: (left.pop() if left else 200, {"score": 1})) as server:
        assert totals(HTTPReward(server.url), ["a"]) == [1]
        assert len(server.requests) == 3
    with serving(lambda body: (400, "no such field")) as server:
        with pytest.raises(RuntimeError, match="status 400: no such field"):
            totals(HTTPReward(server.url), ["a"])
        assert len(server.requests) == 1
    with serving(lambda body: (500, "down")) as server:
        with pytest.raises(RuntimeError, match="2 tries failed, the last with status 500: down"):
            totals(HTTPReward(server.url, retries=1), ["a"])
        assert len(server.requests) == 2


def test_b24_a_server_that_hangs_costs_its_own_completion_only() -> None:
    ended = threading.Event()

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        if body["completion"] == "hang":
            ended.wait(20)
        return 200, {"score": 1}

    started = time.perf_counter()
    with serving(answer) as server:
        with pytest.warns(UserWarning, match=r"gave nothing within 0.5 s; the last try: no reply yet"):
            found = totals(HTTPReward(server.url, timeout=0.5), ["a", "hang", "b"], on_error="exclude")
        ended.set()
    assert found == [1, None, 1]
    assert time.perf_counter() - started < 10


def test_nobody_listens() -> None:
    with serving(lambda body: (200, {})) as server:
        pass
    with pytest.raises(RuntimeError, match="2 tries failed, the last with ConnectError"):
        totals(HTTPReward(server.url, retries=1), ["a"])


@pytest.mark.parametrize("reply", [{}, {"score": "1"}, {"score": True}, [1], {"score": None}])
def test_a_reply_without_a_number_is_shown(reply: Any) -> None:
    with (
        serving(lambda body: (200, reply)) as server,
        pytest.raises(RuntimeError, match=r'replied .*: wanted {"score": number}'),
    ):
        totals(HTTPReward(server.url), ["a"])


def test_a_column_that_is_not_there_is_named() -> None:
    with pytest.raises(RuntimeError, match="there is no column 'colour' to send. There are: .*level"):
        totals(HTTPReward("http://127.0.0.1:1", columns=["colour"]), ["a"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HTTPReward("ftp://host/x"), "must begin with http:// or https://"),
        (lambda: HTTPReward("host/x"), "must begin with http:// or https://"),
        (lambda: HTTPReward("http://host", timeout=0), "timeout=0 must be more than 0"),
        (lambda: HTTPReward("http://host", retries=-1), "retries=-1 must be 0 or more"),
        (lambda: Judge("m", prompt="grade it"), "prompt has no {completion}"),
        (lambda: Judge("m", score=r"\d+"), "has no group"),
        (lambda: Judge("m", scale=0), "scale=0"),
    ],
)
def test_bad_arguments_are_named(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_password_in_the_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(ValueError, match="name api_key_env= instead") as caught:
        HTTPReward("https://me:hunter2@host/x")
    assert "hunter2" not in str(caught.value)


def test_a_judge_is_asked_in_its_words_and_its_last_score_counts() -> None:
    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        assert body["model"] == "grader"
        assert body["temperature"] == 0
        (message,) = body["messages"]
        return 200, chat(f"Score: 2? No.\n**Score:** {message['content'].count('{x}') * 5}")

    with serving(answer) as server:
        judge = Judge("grader", f"{server.url}/v1/", options={"temperature": 0})
        assert totals(judge, ["{x}", "{x} {x} {question}", "none"]) == [0.5, 1.0, 0.0]
    asked = sorted(body["messages"][0]["content"] for body in server.requests)
    assert all("2 + " in text for text in asked)
    assert any("{x} {x} {question}" in text for text in asked), "what a completion says is filled in once"
    assert {headers["path"] for headers in server.headers} == {"/v1/chat/completions"}


@pytest.mark.parametrize("said", ["fine", "Score: 11", "Score: -5", "Score: 2e1", ""])
def test_a_judge_without_a_usable_score_is_an_error(said: str) -> None:
    with (
        serving(lambda body: (200, chat(said))) as server,
        pytest.raises(RuntimeError, match="the judge 'm' gave no score from 0 to 10"),
    ):
        totals(Judge("m", server.url), ["a"])


def test_the_key_comes_from_the_environment_and_goes_nowhere_else(monkeypatch: Any, caplog: Any) -> None:
    secret = "sk-very-secret"
    monkeypatch.setenv("GRADER_KEY", secret)
    caplog.set_level(logging.DEBUG)
    with serving(lambda body: (200, chat("Score: 10"))) as server:
        judge = Judge("m", server.url, api_key_env="GRADER_KEY")
        assert totals(judge, ["a"]) == [1.0]
        assert server.headers[0]["Authorization"] == f"Bearer {secret}"
        server.answer = lambda body: (401, "bad key")
        with pytest.raises(RuntimeError, match="status 401") as caught:
            totals(judge, ["a"])
        monkeypatch.delenv("GRADER_KEY")
        server.answer = lambda body: (200, chat("Score: 10"))
        assert totals(judge, ["a"]) == [1.0]
        assert "Authorization" not in server.headers[-1]
    kept = [repr(vars(judge)), repr(vars(judge._poster)), str(caught.value), str(caught.value.__cause__), caplog.text]
    assert not any(secret in text for text in kept)
    judge._poster._client = None
    assert secret.encode() not in pickle.dumps(copy.deepcopy(judge._poster.__dict__ | {"_loop": None}))


@pytest.mark.parametrize("reply", ['{"score": ', "<html>", ""])
def test_a_reply_that_is_no_json_names_the_server(reply: str) -> None:
    wanted = pytest.raises(RuntimeError, match="replied what is no JSON")
    with serving(lambda body: (200, reply)) as server, wanted as caught:
        totals(HTTPReward(server.url), ["a"])
    assert f"{server.url} replied" in str(caught.value)


def test_a_key_from_a_file_with_a_line_end_works(monkeypatch: Any) -> None:
    monkeypatch.setenv("GRADER_KEY", "sk-1234\n")
    with serving(lambda body: (200, {"score": 1})) as server:
        assert totals(HTTPReward(server.url, api_key_env="GRADER_KEY"), ["a"]) == [1]
    assert server.headers[0]["Authorization"] == "Bearer sk-1234"


@pytest.mark.parametrize("key", ["sk-12\n34", "sk-12\u2026 34"])
def test_a_key_that_no_header_can_hold_is_not_repeated(key: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("GRADER_KEY", key)
    with (
        serving(lambda body: (200, {"score": 1})) as server,
        pytest.raises(RuntimeError, match="the key in GRADER_KEY holds characters") as caught,
    ):
        totals(HTTPReward(server.url, api_key_env="GRADER_KEY"), ["a"])
    assert not server.requests
    assert "sk-12" not in "".join(traceback.format_exception(caught.value))


def test_a_server_that_repeats_the_key_does_not_bring_it_into_the_error(monkeypatch: Any) -> None:
    monkeypatch.setenv("GRADER_KEY", "sk-1234")
    with (
        serving(lambda body: (401, "no such key: sk-1234")) as server,
        pytest.raises(RuntimeError, match=r"status 401: no such key: \*\*\*") as caught,
    ):
        totals(HTTPReward(server.url, api_key_env="GRADER_KEY"), ["a"])
    assert "sk-1234" not in "".join(traceback.format_exception(caught.value))
