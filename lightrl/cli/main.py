"""``lightrl COMMAND``: train, validate, sample, and look at what came of it."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Sequence

HELP = """usage: lightrl COMMAND [options]

Reinforcement-learning post-training of language models, on PyTorch Lightning and vLLM.

  lightrl fit -c config.yaml             train
  lightrl validate -c config.yaml        evaluate on the validation prompts
  lightrl predict -c config.yaml         sample and score them, print the mean, and keep nothing
  lightrl sample -c config.yaml          sample and score them, and write them to --out rollouts.jsonl
  lightrl report RUN                     make one HTML page of a run's folder
  lightrl plan -c config.yaml            take turns or go asynchronous, and with which split of devices

--ckpt_path CKPT gives validate, predict and sample a trained policy and lets fit go on: a file or,
from several ranks, a folder. Each setting of a config file is an option too: --trainer.max_steps 100,
--model.lr 1e-5, --data.group_size 16.

  lightrl COMMAND --help                 what a command takes
  lightrl fit --print_config             every setting with its default, as YAML
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, or 2 for what was typed wrongly."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0
    name, *rest = given
    if name not in COMMANDS:
        nearest = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0)[0]
        print(
            f"lightrl: error: no command {name!r}; did you mean {nearest!r}? `lightrl --help` names all",
            file=sys.stderr,
        )
        return 2
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # rewards and modules of the user's project, as `python -m` finds them
    return COMMANDS[name](name, rest)


def _train(name: str, arguments: list[str]) -> int:
    from lightrl.cli.training import run

    return run(name, arguments)


def _report(name: str, arguments: list[str]) -> int:
    from lightrl.cli.reporting import run

    return run(arguments)


def _plan(name: str, arguments: list[str]) -> int:
    from lightrl.cli.planning import run

    return run(arguments)


COMMANDS: dict[str, Callable[[str, list[str]], int]] = {
    "fit": _train,
    "validate": _train,
    "predict": _train,
    "sample": _train,
    "report": _report,
    "plan": _plan,
}
