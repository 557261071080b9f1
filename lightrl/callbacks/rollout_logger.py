"""Samples of a run, kept where people and programs find them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from lightning.pytorch import Callback
from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger
from typing_extensions import override

from lightrl.arguments import check_at_least_one, check_choice
from lightrl.callbacks.sample_table import spread
from lightrl.distributed import all_objects
from lightrl.packing import StepBatch
from lightrl.types import Rollout, RolloutBatch

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightrl.datamodule import RolloutDataModule

FILES = {"jsonl": "rollouts.jsonl", "parquet": "rollouts"}
"""Names in the run's folder: a file of JSON lines, or a folder of parquet files, one for each logged step."""


class RolloutLogger(Callback):
    """Writes sample completions, from worst to best, to a file in the run's folder and to the loggers that take them.

    TensorBoard gets them as text, W&B and MLflow (and whatever else has ``log_table``) as a table. Other loggers, such
    as ``CSVLogger``, take no tables: then there is the file. Its columns: see :func:`row`.

    Args:
        every_n_steps: optimizer steps between two samples of training; the first is at the first step. Validation is
            sampled each time.
        rows: completions of one sample on each rank; None: all.
        file: ``"jsonl"``: one file, ``rollouts.jsonl``, a line for each completion; ``"parquet"``: a folder,
            ``rollouts``, with a file for each sample; None: loggers only.

    Raises:
        ValueError: an argument is out of range, or ``file`` is None and no logger takes samples.
    """

    def __init__(
        self, every_n_steps: int = 50, rows: int | None = 8, file: Literal["jsonl", "parquet"] | None = "jsonl"
    ) -> None:
        check_at_least_one(every_n_steps=every_n_steps, rows=rows)
        if file is not None:
            check_choice("file", file, tuple(FILES))
        self.every_n_steps, self.rows, self.file = every_n_steps, rows, file
        self._folder = Path()
        self._validated: list[dict[str, Any]] = []

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        dry = trainer.fast_dev_run  # type: ignore[attr-defined]
        if self.file is None and not dry and not any(takes_samples(logger) for logger in trainer.loggers):
            names = ", ".join(type(logger).__name__ for logger in trainer.loggers) or "no logger"
            raise ValueError(
                f"RolloutLogger(file=None) with {names}: nothing takes samples. Use file='jsonl', or a logger with "
                "tables (TensorBoardLogger, WandbLogger, MLFlowLogger)"
            )
        self._folder = Path(trainer.log_dir or trainer.default_root_dir)  # the same on all ranks, which ask together

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: StepBatch, batch_idx: int
    ) -> None:
        if (trainer.global_step - 1) % self.every_n_steps == 0:
            self._write(trainer, "train", self._sample(trainer, batch.rollouts))

    @override
    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._validated = []

    @override
    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: RolloutBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._validated += self._sample(trainer, batch.rollouts)

    @override
    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._write(trainer, "val", self._validated)

    def _sample(self, trainer: pl.Trainer, rollouts: list[Rollout]) -> list[dict[str, Any]]:
        data: RolloutDataModule = trainer.datamodule  # type: ignore[attr-defined]
        chosen = rollouts if self.rows is None else spread(rollouts, self.rows)
        return [row(r, data.tokenizer) for r in chosen]

    def _write(self, trainer: pl.Trainer, split: str, rows: list[dict[str, Any]]) -> None:
        step = trainer.global_step
        rows = [{"step": step, "split": split} | r for theirs in all_objects(rows) for r in theirs]
        if not trainer.is_global_zero or not rows or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        if self.file is not None:
            name = FILES[self.file]
            write_rows(self._folder / (name if self.file == "jsonl" else f"{name}/{split}-{step:08d}.parquet"), rows)
        for logger in trainer.loggers:
            log_rows(logger, f"rollouts/{split}", rows, step)


def row(r: Rollout, tokenizer: Any) -> dict[str, Any]:
    """Return what is kept of a rollout.

    ``reward`` (null: unscored), ``terms`` (the single rewards as JSON), ``advantage`` (its mean over tokens),
    ``tokens`` (of the completion), ``turns``, ``truncated``, ``policy_version`` (the oldest of its tokens), ``prompt``
    and ``completion`` (text, without special tokens). ``step`` and ``split`` ("train" or "val") are put in front.
    """
    versions = r.policy_versions
    return {
        "reward": r.reward,
        "terms": json.dumps(r.reward_terms),
        "advantage": float(r.advantage) if isinstance(r.advantage, int | float) else float(r.advantage.mean()),
        "tokens": len(r.completion_ids),
        "turns": r.turns,
        "truncated": r.truncated,
        "policy_version": int(versions.min()) if len(versions) else 0,
        "prompt": tokenizer.decode(r.prompt_ids, skip_special_tokens=True),
        "completion": r.text,
    }


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Append rows to a file of JSON lines, or write them to a parquet file, as the name's ending says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        with path.open("a") as file:
            file.writelines(json.dumps(r) + "\n" for r in rows)


def takes_samples(logger: Any) -> bool:
    """Whether :func:`log_rows` finds a place for rows in ``logger``."""
    return isinstance(logger, TensorBoardLogger | MLFlowLogger) or hasattr(logger, "log_table")


def log_rows(logger: Any, key: str, rows: list[dict[str, Any]], step: int) -> None:
    """Give rows to a logger, as text or as a table; one that takes neither is passed over."""
    if isinstance(logger, TensorBoardLogger):
        logger.experiment.add_text(key, "\n\n".join(map(_markdown, rows)), step)
    elif isinstance(logger, MLFlowLogger):
        columns = {name: [r[name] for r in rows] for name in rows[0]}
        logger.experiment.log_table(logger.run_id, columns, f"{key}.json")
    elif hasattr(logger, "log_table"):
        logger.log_table(key, columns=list(rows[0]), data=[list(r.values()) for r in rows])


def _markdown(r: dict[str, Any]) -> str:
    reward = "unscored" if r["reward"] is None else f"reward {r['reward']:.3f}"
    # Indented by four, a line is shown as it is: a fence could be closed by the text itself.
    return f"**{reward}**, {r['tokens']} tokens\n\n" + "\n\n".join(
        "\n".join(f"    {line}" for line in r[part].splitlines() or [""]) for part in ("prompt", "completion")
    )
