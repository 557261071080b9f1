"""The pool alone, with engines that are clients without a process: what happens when one is lost at a bad moment."""

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lightrl.engines.messages import EngineSpec, Loaded, Request
from lightrl.engines.staging import Shipment
from lightrl.pools import pool as pools
from lightrl.pools.client import EngineLostError
from lightrl.pools.pool import EngineDiedError, EnginePool
from lightrl.weights.source import HeldWeights


class Client:
    """An engine that does at once what it is asked, unless the test says otherwise."""

    made: list["Client"] = []
    start_seconds = ship_seconds = answer_seconds = 0.0
    on_score: Callable[["Client"], None] = lambda client: None

    def __init__(self, *_: Any) -> None:
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.pending = 0
        self.loaded: list[float] = []
        self.ships: list[float] = []
        self.asked: list[str] = []
        self.aborted: list[str] = []
        self.holds = 0
        self.made.append(self)

    async def configure(self, *_: Any) -> None:
        await asyncio.sleep(self.start_seconds)

    def hold(self) -> None:
        self.holds += 1

    async def ship(self, shipment: Shipment) -> Loaded:
        self.ships.append(time.monotonic())
        await asyncio.sleep(type(self).ship_seconds)
        self.ships.append(time.monotonic())
        self.loaded.append(float(shipment._buffer.view(torch.float32)[0]))
        return Loaded(shipment.push.version, 0.0)

    async def ping(self) -> None:
        await asyncio.sleep(type(self).answer_seconds)

    def give_up(self, reason: str) -> None:
        self.lose(reason)

    async def score(self, sequences: list[list[int]]) -> list[Tensor]:
        type(self).on_score(self)
        if self.lost.done():
            raise EngineLostError(self.lost.result())
        return [torch.zeros(len(s) - 1) for s in sequences]

    def generate(self, requests: list[Request], note: Any) -> list[asyncio.Future[Any]]:
        self.asked += [r.id for r in requests]
        return [asyncio.get_running_loop().create_future() for _ in requests]

    def abort(self, ids: list[str]) -> None:
        self.aborted += ids

    def close(self, linger_ms: int = 0) -> None:
        self.lose("closed")

    def lose(self, reason: str = "lost") -> None:
        if not self.lost.done():
            self.lost.set_result(reason)


class Launcher:
    token, owns = "", False

    def __init__(self, num_engines: int) -> None:
        self.num_engines = num_engines

    async def start(self, index: int) -> str:
        return ""

    def ended(self, index: int) -> None:
        return None

    def last_words(self, index: int) -> str:
        return ""

    def close(self, seconds: float) -> None:
        return None


def weights(value: float, version: int) -> Shipment:
    return Shipment(HeldWeights([("w", torch.full((2,), value))]), version, recompute_kv=True)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., EnginePool]]:
    monkeypatch.setattr(pools, "EngineClient", Client)
    monkeypatch.setattr(Client, "made", [])
    for name in ("start_seconds", "ship_seconds", "answer_seconds"):
        monkeypatch.setattr(Client, name, 0.0)
    monkeypatch.setattr(pools, "_PING_SECONDS", 0.05)
    monkeypatch.setattr(Client, "on_score", lambda client: None)
    started: list[EnginePool] = []

    def begin(num_engines: int = 1, **options: Any) -> EnginePool:
        started.append(EnginePool(Launcher(num_engines), EngineSpec({}, "float32"), **options))
        started[-1].start()
        return started[-1]

    yield begin
    for pool in started:
        pool.close()


def test_a_push_waits_for_an_engine_that_is_started_again(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = start(push_timeout=0.3, start_timeout=10.0)
    pool.push(weights(0.0, 0))
    monkeypatch.setattr(Client, "start_seconds", 1.0)
    pool.loop.call_soon_threadsafe(Client.made[0].lose)
    time.sleep(0.1)
    pool.push(weights(1.0, 1))
    assert Client.made[1].loaded == [1.0]


@pytest.mark.parametrize("num_engines", [1, 2])
def test_an_engine_lost_while_it_scores_does_not_end_the_run(
    num_engines: int, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = start(num_engines)
    pool.push(weights(0.0, 0))
    first = Client.made[0]
    monkeypatch.setattr(Client, "on_score", lambda client: client.lose() if client is first else None)
    scores = pool.call(pool.score([[1, 2, 3]]), timeout=10, what="a check")
    assert [s[0].tolist() for s in scores] == [[0.0, 0.0]]


def test_scores_are_never_of_no_engine(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = start()
    pool.push(weights(0.0, 0))
    monkeypatch.setattr(Client, "start_seconds", 0.5)
    pool.loop.call_soon_threadsafe(Client.made[0].lose)
    time.sleep(0.1)
    assert len(pool.call(pool.score([[1, 2]]), timeout=10, what="a check")) == 1


def test_weights_that_changed_between_two_steps_are_pushed(start: Any) -> None:
    """``mark_weights_dirty``: the version stays, the weights do not."""
    pool = start(2)
    pool.push(weights(0.0, 3))
    pool.push(weights(1.0, 3))
    assert [c.loaded for c in Client.made] == [[0.0, 1.0], [0.0, 1.0]]


def wait_for(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_an_engine_that_stands_still_is_started_again(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = start(answer_timeout=0.2)
    pool.push(weights(0.0, 0))
    time.sleep(0.3)
    assert len(Client.made) == 1, "it answers"
    monkeypatch.setattr(Client, "answer_seconds", 60.0)
    assert wait_for(lambda: len(Client.made) == 2)
    monkeypatch.setattr(Client, "answer_seconds", 0.0)
    assert Client.made[0].lost.result() == "it did not answer within 0.2 s"
    assert wait_for(lambda: Client.made[1].loaded == [0.0])


def test_an_engine_that_loads_has_more_time_than_one_that_answers(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = start(answer_timeout=0.1)
    monkeypatch.setattr(Client, "answer_seconds", 60.0)  # while it loads
    monkeypatch.setattr(Client, "ship_seconds", 0.5)
    pool.push(weights(0.0, 0))
    assert len(Client.made) == 1


def test_an_engine_that_hangs_in_a_push_is_started_again_while_the_other_goes_on(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = start(2, push_timeout=0.3)
    pool.push(weights(0.0, 0))
    hangs, fine = Client.made
    monkeypatch.setattr(hangs, "ship", lambda shipment: asyncio.sleep(60))
    pool.push(weights(1.0, 1))
    assert hangs.lost.result() == "it did not load weights within 0.3 s"
    assert fine.loaded == [0.0, 1.0]
    assert wait_for(lambda: len(Client.made) == 3 and Client.made[2].loaded == [1.0])


def test_engines_load_weights_all_at_once(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = start(3)
    monkeypatch.setattr(Client, "ship_seconds", 0.2)
    pool.push(weights(0.0, 0))
    begun, ended = zip(*(client.ships for client in Client.made), strict=True)
    assert max(begun) < min(ended)


def test_weights_that_are_held_are_read_by_no_engine(start: Any) -> None:
    pool = start()
    pool.push(weights(0.0, 0))
    pool.hold()
    pool.hold()  # as where what was to be written in between failed
    assert Client.made[0].holds == 2, "it is told that a push comes"
    pool.loop.call_soon_threadsafe(Client.made[0].lose)
    assert wait_for(lambda: len(Client.made) == 2)
    time.sleep(0.2)
    assert Client.made[1].loaded == []
    assert not Client.made[1].holds, "it serves nobody yet"
    pool.push(weights(1.0, 1))
    assert Client.made[1].loaded == [1.0]


def test_a_push_amid_an_engines_start_reaches_it(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = start(push_timeout=1.0, start_timeout=2.0)
    pool.push(weights(0.0, 0))
    monkeypatch.setattr(Client, "ship_seconds", 0.3)
    pool.loop.call_soon_threadsafe(Client.made[0].lose)
    assert wait_for(lambda: len(Client.made) == 2 and Client.made[1].ships)
    pool.push(weights(1.0, 1))
    assert Client.made[1].loaded == [0.0, 1.0]


def test_what_nobody_waits_for_any_more_the_engine_is_told_to_drop(start: Any) -> None:
    pool = start()
    pool.push(weights(0.0, 0))
    waiting = asyncio.run_coroutine_threadsafe(pool.generate([Request("1", [5], 4)]), pool.loop)
    assert wait_for(lambda: Client.made[0].asked == ["1"])
    waiting.cancel()
    assert wait_for(lambda: Client.made[0].aborted == ["1"])


def test_losses_of_long_ago_do_not_count(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightrl.pools.member.WINDOW_SECONDS", 0.5)
    monkeypatch.setattr(pools, "_POLL_SECONDS", 0.05)
    pool = start(max_restarts=1)
    for wait in (0.6, 0.6, 0.0):
        engines = len(Client.made)
        pool.loop.call_soon_threadsafe(Client.made[-1].lose)
        assert wait_for(lambda before=engines: len(Client.made) > before)
        time.sleep(wait)
    pool.loop.call_soon_threadsafe(Client.made[-1].lose)
    with pytest.raises(EngineDiedError, match=r"lost \(2 times within an hour, more than max_restarts=1\): lost"):
        pool.push(weights(1.0, 1))
