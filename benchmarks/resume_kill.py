"""A colocated run killed at each named place of a step and resumed: does it end, bitwise, as an unbroken one does?"""

import argparse
import importlib.util
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks import Result

TIMEOUT = 120
RUNS = (("colocated_hf", 1), ("colocated_hf", 2), ("colocated_vllm", 1))


def prepare() -> None:
    from tests.helpers.processes import preload

    preload("tests.helpers.resumable", "transformers.generation", "torch.distributed.checkpoint")


def once(folder: Path, strategy: str, ranks: int, fault: Any, ckpt_path: str | None) -> list[Any]:
    from tests.helpers.processes import run_ranks
    from tests.helpers.resumable import train

    folder.mkdir(parents=True, exist_ok=True)
    args = (str(folder), fault, strategy, ranks, ckpt_path)
    return run_ranks(train, args, ranks, folder / "log", TIMEOUT)[0]


def compare(right: Path, folder: Path, ranks: int) -> list[str]:
    """Where weights, optimizer, scheduler, progress, random state, tokens or logged metrics are not bitwise equal."""
    from tests.helpers.resumable import differences, read_trace

    found = []
    for r in range(ranks):
        end = folder / f"end.{r}"
        if not end.exists():
            return [f"the resumed run did not end: {(folder / f'log.{r}').read_text()[-1500:]}"]
        found += differences(torch.load(right / f"end.{r}"), torch.load(end), f"rank {r}")
        (expected, _), (traced, again) = read_trace(right, r), read_trace(folder, r)
        found += again + differences(expected, traced, f"trace {r}")
    return found


def killed(right: Path, folder: Path, strategy: str, ranks: int, fault: Any) -> list[str]:
    codes = once(folder, strategy, ranks, fault, None)
    if codes[fault.rank] != -9:
        return [f"was not killed: exit codes {codes}"]
    once(folder, strategy, ranks, None, "last")
    return compare(right, folder, ranks)


def matrix(strategy: str, ranks: int, root: Path, only: str = "", step: int = 3) -> list[tuple[str, list[str]]]:
    """Return, for each place that a run of so many ranks passes, what was wrong after a kill there."""
    from tests.faults import faults_of

    right = root / f"{strategy}-{ranks}-unbroken"
    codes = once(right, strategy, ranks, None, None)
    if any(codes):
        raise RuntimeError((right / "log.0").read_text()[-3000:])
    reached = {tuple(place) for place in json.loads((right / f"reached.{ranks - 1}").read_text())}
    rows = []
    for fault in faults_of("kill", 2, step, ranks - 1):
        if only in str(fault) and (fault.phase, fault.moment, fault.micro_batch) in reached:
            wrong = killed(right, root / f"{strategy}-{ranks}-{fault}", strategy, ranks, fault)
            print(f"{strategy}, {ranks} ranks, {fault}: {'; '.join(wrong[:6]) or 'equal'}", flush=True)
            rows.append((f"{strategy} on {ranks}: {fault}", wrong))
    return rows


def main(runs: tuple[tuple[str, int], ...] = RUNS, only: str = "") -> Result:
    prepare()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for strategy, ranks in runs:
            if strategy.endswith("hf") or importlib.util.find_spec("vllm"):
                rows += matrix(strategy, ranks, Path(folder), only)
    bad = [name for name, wrong in rows if wrong]
    return Result(
        figure=f"{len(rows) - len(bad)} of {len(rows)} places equal",
        bar="all, bitwise",
        ok=bool(rows) and not bad,
        table="\n".join(f"NOT EQUAL: {name}" for name in bad) or "all equal",
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.resume_kill", description=__doc__)
    parser.add_argument("--strategy", default="colocated_hf")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--only", default="", help="places with this in their name")
    args = parser.parse_args()
    result = main(((args.strategy, args.ranks),), args.only)
    print(result.table)
    raise SystemExit(not result.ok)
