"""``lightrl plan`` from given figures; from a config it measures first (see :mod:`lightrl.cli.training`)."""

from __future__ import annotations

import argparse

from lightrl.planning import StepSeconds, make_plan

FIGURES = {
    "generate": "seconds of generation",
    "train": "seconds of scoring, forward, backward and update",
    "reward": "seconds of rewards",
    "sync": "seconds of pushing weights",
    "swap": "seconds of memory changing hands",
}


def run(arguments: list[str]) -> int:
    """Print the plan."""
    if any(a.partition("=")[0] in ("-c", "--config") for a in arguments):
        from lightrl.cli.training import run as measure

        return measure("plan", arguments)
    parser = argparse.ArgumentParser(
        prog="lightrl plan",
        description="Say whether taking turns or an asynchronous run is faster, by how much at most, and with which "
        "split of devices. Give the seconds of a step in turns (time/* of a colocated run's log), or a config file "
        "with -c: then a few steps are measured first (lightrl plan -c config.yaml --help).",
    )
    for name, meaning in FIGURES.items():
        parser.add_argument(f"--{name}", type=float, required=name in ("generate", "train"), default=0.0, help=meaning)
    parser.add_argument("--devices", type=int, required=True, help="that these seconds were measured on")
    parser.add_argument(
        "--fixed-share",
        type=float,
        help="share of generation that does not shrink with fewer sequences, from 0 to 1: how much of it remained for "
        "half as many prompts, times two, less one (default: both ends are shown)",
    )
    parser.add_argument("--max-staleness", type=int, default=1, help="of the asynchronous run (default: 1)")
    args = parser.parse_args(arguments)
    seconds = {name: getattr(args, name) for name in FIGURES}
    shares = [0.0, 1.0] if args.fixed_share is None else [args.fixed_share]
    try:
        plans = [make_plan(StepSeconds(**seconds, fixed_share=f), args.devices, args.max_staleness) for f in shares]
    except ValueError as error:
        parser.error(str(error))
    if args.fixed_share is None:
        print("--fixed-share was not given, so here are both ends: the answer lies between them.\n")
    print("\n\n".join(plan.table() for plan in plans))
    return 0
