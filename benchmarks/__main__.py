"""`python -m benchmarks [NAME]`: run one benchmark, or all that this machine can (see README.md)."""

import argparse
import difflib
import importlib
import importlib.util
import pkgutil
import sys
import traceback
from types import ModuleType

import benchmarks
from benchmarks import Result


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def has_vllm() -> bool:
    return importlib.util.find_spec("vllm") is not None


def has_peft() -> bool:
    return importlib.util.find_spec("peft") is not None


def has_gpus() -> bool:
    import torch

    return torch.cuda.device_count() > 1


NEEDS = {"gpu": has_gpu, "gpus": has_gpus, "vllm": has_vllm, "peft": has_peft}


def names() -> list[str]:
    return sorted(m.name for m in pkgutil.iter_modules(benchmarks.__path__) if not m.name.startswith("_"))


def load(name: str) -> ModuleType:
    return importlib.import_module(f"benchmarks.{name}")


def missing(module: ModuleType) -> list[str]:
    return [need for need in getattr(module, "needs", "").split() if not NEEDS[need]()]


def run(name: str) -> bool:
    try:
        result = load(name).main()
    except Exception as error:  # one broken benchmark must not hide the others' figures
        result = Result(
            f"no figure, {type(error).__name__}", "it runs", ok=False, table=traceback.format_exc().rstrip()
        )
    print(result.table)
    print(f"{name}: {'ok' if result.ok else 'short'} {result.figure} (bar {result.bar})", flush=True)
    return result.ok


def run_all() -> bool:
    ok = True
    for name in names():
        if lacks := missing(load(name)):
            print(f"{name}: skipped, needs {' and '.join(lacks)}", flush=True)
        else:
            ok &= run(name)
    return ok


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Run one benchmark, or all.")
    parser.add_argument("name", nargs="?", help="the benchmark to run (default: all that this machine can)")
    parser.add_argument("--list", action="store_true", help="name the benchmarks, one a line")
    args = parser.parse_args(argv)
    if args.list:
        for name in names():
            print(f"{name}: {(load(name).__doc__ or '').strip().partition(chr(10))[0]}")
        return 0
    if args.name is None:
        return 0 if run_all() else 1
    if args.name not in names():
        nearest = difflib.get_close_matches(args.name, names(), n=1, cutoff=0)
        parser.error(f"no benchmark {args.name!r}; did you mean {nearest[0]!r}? --list names all")
    if lacks := missing(load(args.name)):
        parser.error(f"{args.name} needs {' and '.join(lacks)}, which this machine lacks")
    return 0 if run(args.name) else 1


if __name__ == "__main__":
    sys.exit(main())
