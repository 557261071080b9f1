"""One of two ranks raises, hangs, is killed or frozen (SIGSTOP) at each named place: do all end, and is it said why?"""

import argparse
import math
import re
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import Result

DEADLINE, MARGIN = 5.0, 10.0
LAST_SCREEN = 40
KINDS = ("raise", "hang", "kill", "freeze")


def once(folder: Path, strategy: str, fault: Any) -> tuple[list[Any], float]:
    """Return exit codes and the seconds from the fault to the end of the last process."""
    from tests.helpers.processes import run_ranks
    from tests.helpers.resumable import train

    folder.mkdir(parents=True)
    watched = partial(train, heartbeat_timeout=DEADLINE)
    codes, _ = run_ranks(watched, (str(folder), fault, strategy, 2, None, DEADLINE), 2, folder / "log", 90)
    ended = time.time()
    struck = re.search(r"^fault: .* at ([0-9.]+)$", (folder / f"log.{fault.rank}").read_text(), re.MULTILINE)
    return codes, ended - float(struck[1]) if struck else math.nan


def told(folder: Path, fault: Any) -> bool:
    """Whether the last screen of each process that lived to tell names the rank and what became of it."""
    words = {"raise": "boom", "hang": f"rank {fault.rank} hangs"}.get(fault.kind, f"rank {fault.rank} (")
    screens = [folder / f"log.{r}" for r in (0, 1) if fault.kind in ("raise", "hang") or r != fault.rank]
    return all(words in "\n".join(s.read_text().splitlines()[-LAST_SCREEN:]) for s in screens)


def matrix(strategy: str, root: Path, kind: str, only: str = "", rank: int = 1) -> list[tuple[str, float, list[str]]]:
    """Return, for each place that there is, the seconds and what was wrong."""
    from tests.faults import faults_of

    rows = []
    for fault in faults_of(kind, 1, 3, rank):
        if only not in str(fault):
            continue
        folder = root / f"{strategy}-{fault}-{rank}"
        codes, seconds = once(folder, strategy, fault)
        if math.isnan(seconds) and not any(codes):
            continue  # this engine has no such place
        limit = MARGIN + (DEADLINE if kind in ("hang", "freeze") else 0)
        wrong = [] if seconds <= limit else [f"took {seconds:.1f} s"]
        wrong += [] if all(codes) else [f"exit codes {codes}"]
        wrong += [] if told(folder, fault) else ["the last screen does not say why"]
        print(f"{strategy}, rank {rank}, {fault}: {seconds:.1f} s, codes {codes} {'; '.join(wrong)}", flush=True)
        rows.append((f"{fault} on rank {rank}", seconds, wrong))
    return rows


def main(
    strategy: str = "colocated_hf", kinds: tuple[str, ...] = KINDS, only: str = "", ranks: tuple[int, ...] = (0, 1)
) -> Result:
    from benchmarks.resume_kill import prepare

    prepare()
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for rank in ranks for kind in kinds for row in matrix(strategy, Path(folder), kind, only, rank)]
    bad = [f"{name}: {'; '.join(wrong)}" for name, _, wrong in rows if wrong]
    longest = max((seconds for _, seconds, _ in rows), default=math.nan)
    return Result(
        figure=f"{len(rows) - len(bad)} of {len(rows)} places, longest {longest:.1f} s (deadline {DEADLINE:.0f} s)",
        bar=f"all gone within deadline + {MARGIN:.0f} s, first cause told, exit code not 0",
        ok=bool(rows) and not bad,
        table="\n".join(bad) or "all as they should be",
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.failures", description=__doc__)
    parser.add_argument("--strategy", default="colocated_hf")
    parser.add_argument("--kinds", nargs="+", default=KINDS)
    parser.add_argument("--only", default="", help="places with this in their name")
    parser.add_argument("--ranks", type=int, nargs="+", default=[0, 1])
    args = parser.parse_args()
    result = main(args.strategy, tuple(args.kinds), args.only, tuple(args.ranks))
    print(result.table)
    raise SystemExit(not result.ok)
