"""Say which of the public bug cases no test shows yet."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.helpers.cases import case_ids, covered_ids

ids = case_ids()
missing = [case for case in ids if case not in covered_ids()]
print(f"covered {len(ids) - len(missing)} of {len(ids)}; missing: {' '.join(missing) or 'none'}")
