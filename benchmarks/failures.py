"""One of two ranks raises, hangs or is killed at each named place: how long until all are gone, and is it said why?"""

import argparse
import re
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import Result

DEADLINE, MARGIN = 5.0, 10.0
LAST_SCREEN = 40


def once(folder: Path, strategy: str, fault: Any) -> tuple[list[Any], float]:
    """Return exit codes and the seconds from the fault to the end of the last process."""
    from tests.helpers.processes import run_ranks
    from tests.helpers.resumable import train

    folder.mkdir(parents=True)
    args = (str(folder), fault, strategy, 2, None, DEADLINE)
    codes, _ = run_ranks(train, args, 2, folder / "log", 90)
    ended = time.time()
    struck = re.search(r"^fault: .* at ([0-9.]+)$", (folder / f"log.{fault.rank}").read_text(), re.M)
    return codes, ended - float(struck[1]) if struck else float("nan")


def told(folder: Path, fault: Any) -> bool:
    """Whether the last screen of each process that lived to tell names the rank and what became of it."""
    words = {"raise": "boom", "hang": f"rank {fault.rank} hangs", "kill": f"rank {fault.rank} ("}[fault.kind]
    screens = [folder / f"log.{r}" for r in (0, 1) if fault.kind != "kill" or r != fault.rank]
    return all(words in "\n".join(s.read_text().splitlines()[-LAST_SCREEN:]) for s in screens)


def matrix(strategy: str, root: Path, kinds: list[str], only: str = "", rank: int = 1, step: int = 3) -> list[list[str]]:
    from tests.faults import Fault, places

    rows = []
    for kind in kinds:
        for phase, moment, part in places(1):
            if only and only not in f"{phase} {moment}":
                continue
            at = step - 1 if phase == "optimizer" and moment != "after" else step
            fault = Fault(kind, phase, moment, at, rank, part)
            folder = root / str(fault).replace(" ", "-")
            codes, seconds = once(folder, strategy, fault)
            if seconds != seconds and not any(codes):
                continue  # this engine has no such place
            limit = MARGIN + (DEADLINE if kind == "hang" else 0)
            wrong = [] if seconds <= limit else [f"took {seconds:.1f} s"]
            wrong += [] if all(codes) else [f"exit codes {codes}"]
            wrong += [] if told(folder, fault) else ["the last screen does not say why"]
            print(f"{fault}: {seconds:.1f} s, codes {codes} {'; '.join(wrong)}", flush=True)
            rows.append(wrong)
    return rows


if __name__ == "__main__":
    from benchmarks.resume_kill import prepare

    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="colocated_hf")
    parser.add_argument("--kinds", default="raise,hang,kill")
    parser.add_argument("--only", default="")
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    prepare()
    with tempfile.TemporaryDirectory() as folder:
        matrix(args.strategy, args.folder or Path(folder), args.kinds.split(","), args.only, args.rank)
