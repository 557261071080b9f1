"""A colocated run killed at each named place of a step and resumed: does it end, bitwise, where an unbroken one does?"""

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import Result

TIMEOUT = 120


def prepare() -> None:
    from tests.helpers.processes import preload

    preload("tests.helpers.resumable", "transformers.generation", "torch.distributed.checkpoint")


def once(folder: Path, strategy: str, ranks: int, fault: Any, ckpt_path: str | None) -> tuple[list[Any], float]:
    from tests.helpers.processes import run_ranks
    from tests.helpers.resumable import train

    folder.mkdir(parents=True, exist_ok=True)
    return run_ranks(train, (str(folder), fault, strategy, ranks, ckpt_path), ranks, folder / "log", TIMEOUT)


def compare(right: Path, folder: Path, ranks: int) -> list[str]:
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
    codes, _ = once(folder, strategy, ranks, fault, None)
    if codes[fault.rank] != -9:
        return [f"was not killed: exit codes {codes}"]
    codes, _ = once(folder, strategy, ranks, None, "last")
    return compare(right, folder, ranks)


def matrix(strategy: str, ranks: int, root: Path, only: str = "", step: int = 3) -> list[tuple[str, list[str]]]:
    from tests.faults import Fault, places

    right = root / "unbroken"
    codes, seconds = once(right, strategy, ranks, None, None)
    print(f"{strategy}, {ranks} ranks: unbroken run in {seconds:.1f} s, exit codes {codes}", flush=True)
    if any(codes):
        raise RuntimeError((right / "log.0").read_text()[-3000:])
    rows = []
    reached = {tuple(place) for place in json.loads((right / f"reached.{ranks - 1}").read_text())}
    for phase, moment, part in places(2):
        if (only and only not in f"{phase} {moment} {part}") or (phase, moment, part) not in reached:
            continue
        at = step - 1 if phase == "optimizer" and moment != "after" else step
        fault = Fault("kill", phase, moment, at, ranks - 1, part)
        wrong = killed(right, root / str(fault).replace(" ", "-"), strategy, ranks, fault)
        print(f"{fault}: {'; '.join(wrong[:6]) or 'equal'}", flush=True)
        rows.append((str(fault), wrong))
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="colocated_hf")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    prepare()
    with tempfile.TemporaryDirectory() as folder:
        matrix(args.strategy, args.ranks, Path(folder), args.only)
