"""What a rank concludes from heartbeats; and a sample of the benchmarks ``failures`` and ``resume_kill``."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks._subprocess import ROOT, run_module
from lightrl import watch as watching
from lightrl.phases import Phases
from lightrl.processes import host_id
from lightrl.watch import Failure, Watch


def watch_of_two(**beats: Any) -> Watch:
    """Rank 0's watch over two ranks, and what rank 1 last said of itself."""
    watch = Watch(Phases(), "127.0.0.1", silence=60.0, last_words=lambda: None)
    watch._store, watch.ranks = dist.HashStore(), 2
    beat = {"beat": 1, "number": 5, "phase": "train", "seconds": 1.0, "step": 3, "host": host_id(), "waits": False}
    watch._store.set("beat/1", json.dumps(beat | beats))
    watch._publish()
    return watch


def test_a_process_that_is_no_more_is_missed_at_once_and_a_silent_one_when_its_time_is_up() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert "ended without a word, in phase 'train' of step 3" in str(watch_of_two(pid=ended.pid)._peer_gone())
    alive = watch_of_two(pid=os.getpid())
    assert alive._peer_gone() is None
    elsewhere = watch_of_two(pid=ended.pid, host="another")
    assert elsewhere._peer_gone() is None
    elsewhere._seen[1] = (1, elsewhere._seen[1][1] - 61)
    assert "has given no sign of life for 60 s" in str(elsewhere._peer_gone())


@pytest.mark.parametrize(
    ("number", "waits", "slowest"), [(0, False, 0), (0, True, 0), (-1, True, 1), (9, False, 0)], ids=str
)
def test_the_rank_that_has_come_least_far_is_the_one_waited_for(number: int, waits: bool, slowest: int) -> None:
    watch = watch_of_two(pid=os.getpid(), number=number, waits=waits)
    failure = watch._waited_for("in phase 'other' for 2 s")
    assert (failure.rank, failure.kind) == (slowest, "late")
    assert failure.text.count("  rank ") == 2, "a line for each"


def test_what_was_first_stays_first() -> None:
    watch = watch_of_two(pid=os.getpid())
    first = Failure(1, "raised", "failed first, with\nboom")
    assert watch._report(first) == first
    assert watch._report(Failure(0, "raised", "failed first, with\nan echo")) == first
    assert watch._failure() == first


def test_whoever_waits_for_its_own_main_thread_to_save_does_not_wait_for_the_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watching, "_POLL", 0.01)
    monkeypatch.setattr(watching, "_STORE_SECONDS", 0.1)
    watch = watch_of_two(pid=os.getpid())
    watch.silence, ended = 0.1, []
    watch._end = ended.append  # type: ignore[method-assign]
    minding = threading.Thread(target=watch._mind_store)
    unwinding = threading.Thread(target=watch._unwind)
    with watch.phases.inside("save"):
        unwinding.start()
        minding.start()
        minding.join(0.5)
        watch._stopping.set()
        unwinding.join()
        minding.join()
    assert ended == []


@pytest.mark.parametrize(
    ("kind", "place", "rank"),
    [("hang", "during reward", 1), ("kill", "during micro_batch", 0), ("freeze", "during micro_batch", 0)],
)
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_b45_a_rank_that_hangs_or_is_killed_ends_both_and_is_named(kind: str, place: str, rank: int) -> None:
    run_module("benchmarks.failures", "--kinds", kind, "--only", place, "--ranks", rank, timeout=300)


@pytest.mark.parametrize(("ranks", "place"), [(1, "during validation"), (2, "during save")])
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_b42_a_killed_run_that_is_resumed_ends_bitwise_where_it_would_have(ranks: int, place: str) -> None:
    run_module("benchmarks.resume_kill", "--ranks", ranks, "--only", place, timeout=500)


HANGS = """
import time
from tests.helpers.fits import quiet_trainer, share_of_even_words, tiny_data
from tests.helpers.tiny import tiny_model
from lightrl import RLModule
from lightrl.strategies import ColocatedHFStrategy

class Hangs(RLModule):
    def advantages(self, batch):
        time.sleep(600)

quiet_trainer(ColocatedHFStrategy(timeout=2.0), max_steps=1).fit(Hangs(tiny_model()), tiny_data())
"""


@pytest.mark.slow
def test_one_process_that_hangs_says_where_and_ends(tmp_path: Path) -> None:
    program = tmp_path / "hangs.py"
    program.write_text(HANGS)
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 1
    assert "rank 0 is in phase 'other' for 2 s, more than timeout=2 s" in done.stderr
    assert done.stderr.rstrip().endswith("time.sleep(600)")
