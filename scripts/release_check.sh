#!/usr/bin/env bash
# What a release must pass: its wheel, installed by itself into a fresh environment, imports anywhere and runs the demo.
# Builds with the Python $1.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$1" -m pip --disable-pip-version-check -q wheel --no-deps -w "$work" .
wheel=$(echo "$work"/lightrl_trainer-*.whl)
scripts/setup.sh "$work/venv" "$wheel"

cp -r examples "$work" # away from the checkout, whose lightrl would be found first
cd "$work"
venv/bin/python - <<'END'
import sys

sys.modules |= dict.fromkeys(["vllm", "ray", "peft"])  # an import of theirs would fail
import lightrl

assert lightrl.__file__.startswith(sys.prefix), f"{lightrl.__file__} is not the wheel's"
print(f"release-check: lightrl {lightrl.__version__} from {lightrl.__file__}")
END
venv/bin/python -m examples.tiny.run
echo "release-check: $(basename "$wheel") is installable and trains, $SECONDS s"
