"""Every wait has a deadline by phase."""

import threading
from datetime import timedelta
from typing import Any

import pytest

from lightrl import phases
from lightrl.phases import Phases


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(phases.time, "monotonic", lambda: self.now)


def test_a_phase_inside_another_has_the_clock_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, watched = Clock(monkeypatch), Phases({"generate": 5.0, "push": 20.0})
    with watched.inside("generate"):
        clock.now += 4
        with watched.inside("push"):
            clock.now += 19
            assert watched.late() is None
            clock.now += 2
            assert watched.late() == "in phase 'push' for 21 s, more than timeout=20 s"
        assert watched.late() is None
        clock.now += 6
        assert watched.late() == "in phase 'generate' for 6 s, more than timeout=5 s"
    assert watched.late() is None
    assert watched.now.number == 4
    assert watched.limits["reward"] == phases.SECONDS


def test_other_threads_are_in_no_phase() -> None:
    watched = Phases(1.0)

    def work() -> None:
        with watched.inside("reward"):
            seen.append(watched.now.name)

    seen: list[str] = []
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == ["other"]


@pytest.mark.parametrize(
    ("timeout", "message"),
    [({"sampling": 3.0}, "'sampling', which is no phase: they are setup, swap, generate"), (0.0, "must be above 0")],
)
def test_bad_limits_are_refused(timeout: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Phases(timeout)


def test_a_timedelta_is_taken_too() -> None:
    assert Phases(timedelta(minutes=1)).limits["save"] == 60.0
