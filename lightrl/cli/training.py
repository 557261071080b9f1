"""The commands that run a Trainer: LightningCLI with one more verb and errors that a person can read."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any, NoReturn

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from typing_extensions import override

from lightrl.callbacks.rollout_logger import row, write_rows
from lightrl.checkpoints import check_checkpoint
from lightrl.cli.keys import unknown_keys
from lightrl.cli.measure import check_measurable, measured_step
from lightrl.datamodule import RolloutDataModule
from lightrl.distributed import all_objects
from lightrl.module import RLModule
from lightrl.planning import check_plannable, make_plan
from lightrl.types import Rollout


class SamplingTrainer(Trainer):
    """A Trainer that can also write rollouts to a file."""

    def sample(
        self,
        model: LightningModule,
        datamodule: LightningDataModule,
        ckpt_path: str | Path | None = None,
        out: str = "rollouts.jsonl",
        weights_only: bool | None = None,
    ) -> None:
        """Sample and score the validation prompts, and write each completion to a file.

        ``data.val_group_size`` and ``data.val_temperature`` say how many of each prompt and how warm.

        Args:
            model: whose policy samples.
            datamodule: with ``val_prompts``.
            ckpt_path: checkpoint to load first, a file or a folder; None: the model as it is given.
            out: ``.jsonl`` or ``.parquet`` file to write.
            weights_only: see ``Trainer.predict``.

        Raises:
            ValueError: ``out`` has another ending, or exists already.
        """
        path = new_file(out)
        batches: Any = self.predict(model, datamodule=datamodule, ckpt_path=ckpt_path, weights_only=weights_only)
        tokenizer = datamodule.tokenizer  # type: ignore[attr-defined]
        rows = [row(rollout, tokenizer) for batch in batches or [] for rollout in batch]
        # Of rollouts that nobody trains on, all by one policy, these say nothing.
        rows = [{k: v for k, v in r.items() if k not in ("advantage", "policy_version")} for r in rows]
        rows = [r for theirs in all_objects(rows) for r in theirs]
        if self.is_global_zero:
            write_rows(path, rows)
            print(f"{summary([r['reward'] for r in rows])}: {path}")

    def plan(
        self,
        model: LightningModule,
        datamodule: LightningDataModule,
        batches: int = 4,
        max_staleness: int = 1,
        planned_devices: int | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Measure a few steps in turns and say whether an asynchronous run is faster, and with which split.

        Args:
            model: what would be trained; it is, for these steps, and nothing is saved.
            datamodule: as it would be trained on.
            batches: rollout batches to measure, the first of which warms up; as many again at half the size.
            max_staleness: of the asynchronous run.
            planned_devices: devices to plan for, if each is to do as much as one here does; None: those measured on.
            ckpt_path: checkpoint to go on from: completions are as long as its policy makes them.
            weights_only: see ``Trainer.fit``.
        """
        loading = {"ckpt_path": ckpt_path, "weights_only": weights_only}
        step = measured_step(self, model, datamodule, batches, **loading)  # type: ignore[arg-type]
        if self.is_global_zero:
            print(make_plan(step, self.planned(planned_devices), max_staleness).table())

    def planned(self, devices: int | None) -> int:
        """Return how many devices a plan is for."""
        return self.num_devices * self.num_nodes if devices is None else devices


def summary(rewards: list[float | None]) -> str:
    """Return how many completions there are, and their mean reward without those that nobody scored."""
    scored = [r for r in rewards if r is not None]
    mean = f"mean reward {sum(scored) / len(scored):.4g}" if scored else "none scored"
    unscored = f" ({len(scored)} scored)" if 0 < len(scored) < len(rewards) else ""
    return f"{len(rewards)} completions, {mean}{unscored}"


def new_file(out: str) -> Path:
    """Return ``out`` as a path to write to.

    Raises:
        ValueError: it has another ending than .jsonl or .parquet, or exists already.
    """
    path = Path(out)
    if path.suffix not in (".jsonl", ".parquet"):
        raise ValueError(f"out={out!r} must end in .jsonl or .parquet")
    if path.exists():
        raise ValueError(f"out={out!r} exists already: give another name, or remove it")
    return path


def checkpoint_path(path: str | None) -> None:
    """Refuse a checkpoint that is not there; Lightning looks for it after everything is loaded.

    Raises:
        ValueError: ``path`` is no checkpoint that is there, nor an address, nor a word of Lightning's such as ``last``.
    """
    if path is None or path in ("last", "hpc") or path.partition(":")[0] == "registry" or "://" in path:
        return
    if not path or not Path(path).exists():  # "best" is for a Trainer that has trained
        raise ValueError(f"ckpt_path={path!r} is not there: give a checkpoint's file or folder, or 'last'")
    check_checkpoint(path)


class KeepConfig(SaveConfigCallback):
    """Saves the config into the folder of a training run; without a logger there is none."""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and trainer.loggers:
            super().setup(trainer, pl_module, stage)


class CommandLine(LightningCLI):
    """``fit``, ``validate``, ``predict`` and ``sample``, with ``model``, ``data`` and ``trainer`` from a config."""

    def __init__(self, name: str, args: ArgsType) -> None:
        self.name = name
        super().__init__(
            RLModule,
            RolloutDataModule,
            trainer_class=SamplingTrainer,
            subclass_mode_model=True,
            auto_configure_optimizers=False,
            save_config_callback=KeepConfig,
            save_config_kwargs={"overwrite": True},
            args=args,
        )

    @staticmethod
    @override
    def subcommands() -> dict[str, set[str]]:
        return {
            "fit": {"model", "train_dataloaders", "val_dataloaders", "datamodule"},
            "validate": {"model", "dataloaders", "datamodule"},
            "predict": {"model", "dataloaders", "datamodule", "return_predictions"},
            "sample": {"model", "datamodule"},
            "plan": {"model", "datamodule"},
        }

    @override
    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        return super().init_parser(**kwargs | {"exit_on_error": False, "prog": "lightrl"})

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        from jsonargparse import ArgumentError

        try:
            super().parse_arguments(parser, args)
        except ArgumentError as error:
            known = {
                action.dest
                for action in self._subcommand_parsers[self.name]._actions
                if not action.dest.endswith(".help")
            }
            assert isinstance(args, list)
            wrong = unknown_keys(args[1:], known, RLModule)
            self._refuse("\n".join(wrong) if wrong else plain(str(error)))

    @override
    def _parse_ckpt_path(self) -> None:
        """Nothing: Lightning would put what a checkpoint was trained with over what is typed now."""

    @override
    def instantiate_classes(self) -> None:
        try:
            checkpoint_path(self.config[self.name].get("ckpt_path"))
            super().instantiate_classes()
        except ValueError as error:  # of an argument: what the constructors raise names it and the fix
            self._refuse(strategies(plain(str(error))))

    def before_sample(self) -> None:
        """Refuse a file that cannot be written before anything is loaded."""
        try:
            new_file(self.config_init["sample"]["out"])
        except ValueError as error:
            self._refuse(str(error))

    def after_predict(self) -> None:
        """Say what came of it."""
        batches: Any = self.trainer.predict_loop.predictions
        rollouts: list[Rollout] = [rollout for batch in batches or [] for rollout in batch]
        rewards = [reward for theirs in all_objects([r.reward for r in rollouts]) for reward in theirs]
        if self.trainer.is_global_zero:
            print(summary(rewards))

    def before_plan(self) -> None:
        """Refuse a run that cannot be measured."""
        asked, trainer = self.config_init["plan"], self.trainer
        assert isinstance(trainer, SamplingTrainer)
        try:
            check_measurable(trainer, self.datamodule, asked["batches"])
            check_plannable(trainer.planned(asked["planned_devices"]), asked["max_staleness"])
        except ValueError as error:
            more = "; --planned_devices N plans for more than are here" if str(error).startswith("devices=") else ""
            self._refuse(f"{error}{more}")

    def _refuse(self, message: str) -> NoReturn:
        print(f"lightrl {self.name}: error: {message}", file=sys.stderr)
        raise SystemExit(2)


def plain(message: str) -> str:
    """Return jsonargparse's account of a value that fits no type of a union, without the types and what it holds."""
    key, found, rest = message.partition("Errors:\n")
    if not found:
        return message
    reasons = [line.strip().removeprefix("- ") for line in rest.split("Given value")[0].splitlines()]
    kept = [line for line in reasons if line and "NoneType" not in line]
    place = [key.splitlines()[0]] if key.startswith("Parser key") else []
    return "\n".join([*place, *kept])


def strategies(message: str) -> str:
    """Return Lightning's account of an unknown strategy with the names that can sample; other messages as they are."""
    head, found, _ = message.partition("It must be either a string")
    if not found or "invalid strategy name" not in head:
        return message
    return f"{head.strip()} Those that sample are 'colocated_vllm', 'async_vllm' and 'colocated_hf'."


def run(name: str, arguments: list[str]) -> int:
    """Run one of the Trainer's commands."""
    # Lightning takes arguments that are handed on for a mistake in a script.
    warnings.filterwarnings("ignore", message="LightningCLI's args parameter is intended to run from within Python")
    CommandLine(name, [name, *arguments])
    return 0
