"""``lightrl report``."""

from __future__ import annotations

import argparse
from pathlib import Path

from lightrl.report import write_report


def run(arguments: list[str]) -> int:
    """Make the page of a run and say where it is."""
    parser = argparse.ArgumentParser(
        prog="lightrl report", description="Make one HTML page of a run: curves, time split, samples."
    )
    parser.add_argument("run", type=Path, help="folder of the run, or one that has runs (version_N) below it")
    parser.add_argument("--out", type=Path, help="file to write (default: report.html in the run's folder)")
    args = parser.parse_args(arguments)
    try:
        print(write_report(args.run, args.out))
    except ValueError as error:
        parser.error(str(error))
    return 0
