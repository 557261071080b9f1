"""A sample of what the benchmarks ``failures`` and ``resume_kill`` go through, place by place."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks._subprocess import ROOT, run_module

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("kind", "place", "rank"),
    [("hang", "during reward", 1), ("kill", "during micro_batch", 0), ("freeze", "during micro_batch", 0)],
)
def test_b45_a_rank_that_hangs_or_is_killed_ends_both_and_is_named(kind: str, place: str, rank: int) -> None:
    run_module("benchmarks.failures", "--kinds", kind, "--only", place, "--ranks", rank, timeout=300)


@pytest.mark.parametrize(("ranks", "place"), [(1, "during validation"), (2, "during save")])
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


def test_one_process_that_hangs_says_where_and_ends(tmp_path: Path) -> None:
    program = tmp_path / "hangs.py"
    program.write_text(HANGS)
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 1
    assert "rank 0 is in phase 'other' for 2 s, more than timeout=2 s" in done.stderr
    assert done.stderr.rstrip().endswith("time.sleep(600)")
