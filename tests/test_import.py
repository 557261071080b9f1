"""What `import lightrl` costs: no warning, no package that a run may do without, hardly more time than Lightning."""

import json
import subprocess
import sys
from typing import Any

import pytest

MOST_OF_LIGHTNINGS = 1.1
RUNS = 5
HEAVY = {
    "vllm",
    "ray",
    "peft",
    "bitsandbytes",
    "datasets",
    "pandas",
    "pyarrow",
    "matplotlib",
    "tensorboard",
    "reasoning_gym",
}

# In one process, so that what else the machine does meets both alike; its own time, not the clock's.
PROGRAM = """
import json, sys, time
began = time.process_time()
import lightning.pytorch
between, before = time.process_time(), set(sys.modules)
import lightrl
seconds = between - began, time.process_time() - between
print(json.dumps({"seconds": seconds, "new": sorted(set(sys.modules) - before), "all": sorted(sys.modules)}))
"""


def imported(*options: str) -> dict[str, list[Any]]:
    done = subprocess.run([sys.executable, *options, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.slow
def test_it_warns_of_nothing_and_brings_nothing_that_a_run_may_do_without() -> None:
    found = imported("-W", "error")
    assert not {name.partition(".")[0] for name in found["new"]} & HEAVY
    assert not {name.partition(".")[0] for name in found["all"]} & {"vllm", "ray", "peft"}
    # Lightning's torchmetrics brings some of transformers; no model's code is added to it.
    assert not [name for name in found["new"] if name.startswith("transformers.models.")]


@pytest.mark.slow
def test_it_takes_hardly_longer_than_lightning() -> None:
    lightning, more = (min(times) for times in zip(*(imported()["seconds"] for _ in range(RUNS)), strict=True))
    ratio = (lightning + more) / lightning
    assert ratio <= MOST_OF_LIGHTNINGS, f"import lightrl takes {ratio:.2f} x import lightning.pytorch"
