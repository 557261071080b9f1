"""The ids of the public bug cases: faults that users of similar libraries met, each of which a test here must show."""

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent


def case_ids() -> list[str]:
    return (TESTS / "cases.txt").read_text().split()


def covered_ids() -> set[str]:
    """The ids that stand in the name of a test, such as B07 in `test_b07_clip_is_per_token`."""
    names = [name for path in TESTS.rglob("*.py") for name in re.findall(r"^ *def (test_\w+)", path.read_text(), re.M)]
    return {word.upper() for name in names for word in name.split("_") if re.fullmatch(r"b\d\d", word)}
