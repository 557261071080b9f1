"""What is kept of a run's samples, read back from where it is kept."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightrl import RLModule
from lightrl.callbacks import KLMonitor, RolloutEvaluation, RolloutLogger
from lightrl.callbacks.rollout_logger import row
from lightrl.types import Rollout
from tests.helpers import fits
from tests.helpers.tiny import tiny_model, tiny_prompts, tiny_tokenizer
from tests.helpers.training import quiet_trainer, tiny_data, tiny_module

COLUMNS = ["step", "split", "reward", "terms", "advantage", "tokens", "turns", "truncated", "policy_version"]
COLUMNS += ["prompt", "completion"]


def fit(logger: Any, **args: Any) -> Any:
    trainer = quiet_trainer(
        max_steps=4,
        logger=logger,
        callbacks=[RolloutLogger(**args)],
        val_check_interval=4,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=1,
    )
    trainer.fit(tiny_module(), tiny_data(val_prompts=tiny_prompts(3), val_batch_size=2))
    return trainer


def json_lines(folder: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(folder) / "rollouts.jsonl").read_text().splitlines()]


def test_a_logger_without_tables_leaves_the_file(tmp_path: Path) -> None:
    trainer = fit(CSVLogger(tmp_path), every_n_steps=2, rows=3)
    rows = json_lines(trainer.log_dir)
    assert [(r["step"], r["split"]) for r in rows] == [(1, "train")] * 3 + [(3, "train")] * 3 + [(4, "val")] * 3
    assert all(list(r) == COLUMNS for r in rows)
    for step in (1, 3):
        rewards = [r["reward"] for r in rows if r["step"] == step]
        assert rewards == sorted(rewards), "from worst to best"
    first = rows[0]
    assert json.loads(first["terms"]) == {"reward_even": first["reward"]}
    assert len(first["completion"].split()) <= first["tokens"] == 3
    assert first["prompt"] in [p["prompt"] for p in tiny_prompts(8)]


def test_without_a_logger_the_file_lies_in_the_trainers_folder(tmp_path: Path) -> None:
    trainer = quiet_trainer(max_steps=1, callbacks=[RolloutLogger(rows=None)], default_root_dir=tmp_path)
    trainer.fit(tiny_module(), tiny_data())
    assert len(json_lines(tmp_path)) == 4


def test_parquet_has_the_same_rows_in_a_file_for_each_sample(tmp_path: Path) -> None:
    trainer = fit(CSVLogger(tmp_path), every_n_steps=2, rows=3, file="parquet")
    folder = Path(trainer.log_dir) / "rollouts"
    names = ["train-00000001.parquet", "train-00000003.parquet", "val-00000004.parquet"]
    assert sorted(p.name for p in folder.iterdir()) == names
    table = pq.read_table(folder)
    assert table.column_names == COLUMNS
    assert table.num_rows == 9


def test_tensorboard_gets_text(tmp_path: Path) -> None:
    trainer = fit(TensorBoardLogger(tmp_path), every_n_steps=2, rows=3, file=None)
    assert not (Path(trainer.log_dir) / "rollouts.jsonl").exists()
    events = EventAccumulator(trainer.log_dir).Reload()
    texts = events.Tensors("rollouts/train/text_summary")
    assert [t.step for t in texts] == [1, 3]
    text = texts[0].tensor_proto.string_val[0].decode()
    assert text.count("**reward 0.") + text.count("**reward 1.") == 3
    assert "\n    w" in text, "prompt and completion as they are"
    assert [t.step for t in events.Tensors("rollouts/val/text_summary")] == [4]


class Tables(Logger):
    """As much of a logger as W&B's shows: a ``log_table``."""

    name, version = "tables", 0

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[tuple[str, list[str], list[list[Any]]]] = []

    def log_metrics(self, metrics: Any, step: Any = None) -> None: ...

    def log_hyperparams(self, params: Any, *args: Any) -> None: ...

    def log_table(self, key: str, columns: list[str], data: list[list[Any]]) -> None:
        self.tables.append((key, columns, data))


def test_a_logger_with_tables_gets_tables() -> None:
    logger = Tables()
    fit(logger, every_n_steps=2, rows=3, file=None)
    assert [(key, len(data)) for key, _, data in logger.tables] == [
        ("rollouts/train", 3),
        ("rollouts/train", 3),
        ("rollouts/val", 3),
    ]
    _, columns, data = logger.tables[0]
    assert columns == COLUMNS
    assert all(len(values) == len(COLUMNS) for values in data)


def test_a_table_of_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    from lightning.pytorch.loggers import WandbLogger

    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger(save_dir=tmp_path, offline=True)
    fit(logger, every_n_steps=2, rows=3, file=None)
    logger.experiment.finish()
    wandb.teardown()  # its helper process, too
    tables = [json.loads(p.read_text()) for p in tmp_path.rglob("*.table.json")]
    assert sorted(len(t["data"]) for t in tables) == [3, 3, 3]
    assert tables[0]["columns"] == COLUMNS


def test_a_table_of_mlflow(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    from lightning.pytorch.loggers import MLFlowLogger

    logger = MLFlowLogger(tracking_uri=f"sqlite:///{tmp_path}/runs.db", artifact_location=str(tmp_path / "artifacts"))
    fit(logger, every_n_steps=2, rows=3, file=None)
    table = logger.experiment.load_table(logger.experiment_id, "rollouts/train.json", run_ids=[logger.run_id])
    assert list(table.columns) == COLUMNS
    assert list(table["step"]) == [1, 1, 1, 3, 3, 3]


def test_text_that_looks_like_markup_stays_text() -> None:
    text = "a\n```\n**b**"
    r = Rollout([3], [4, 5], torch.zeros(2), advantage=torch.tensor([1.0, 3.0]), text=text)
    kept = row(r, tiny_tokenizer())
    assert (kept["reward"], kept["advantage"], kept["completion"], kept["prompt"]) == (None, 2.0, text, "w3")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"every_n_steps": 0}, "every_n_steps=0"),
        ({"rows": 0}, "rows=0"),
        ({"file": "csv"}, "file='csv' is not one of jsonl, parquet"),
    ],
)
def test_bad_arguments(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RolloutLogger(**args)


def test_nowhere_to_write_to_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"RolloutLogger\(file=None\) with CSVLogger: nothing takes samples"):
        fit(CSVLogger(tmp_path), file=None)


@pytest.mark.vllm
def test_monitor_evaluation_and_samples_of_the_real_engine(tmp_path: Path) -> None:
    callbacks = [KLMonitor(reference=True, stop_mismatch_above=1e-4), RolloutEvaluation(2), RolloutLogger(2, rows=None)]
    options: dict[str, Any] = {"val_check_interval": 2, "check_val_every_n_epoch": None}
    trainer = fits.quiet_trainer(max_steps=3, callbacks=callbacks, logger=CSVLogger(tmp_path), **options)
    data = fits.tiny_data(val_prompts=tiny_prompts(3))
    trainer.fit(RLModule(tiny_model(), lr=0.02), data)
    assert trainer.global_step == 3, "the engine holds the policy: no stop"
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert 0 <= metrics["kl/mismatch"] < 1e-4
    assert metrics["kl/ref"] > 1e-4
    assert metrics["kl/ref_per_completion"] != 0
    assert metrics["val/num_completions"] == 6
    rows = json_lines(trainer.log_dir)
    assert [(r["step"], r["split"]) for r in rows] == [(1, "train")] * 12 + [(2, "val")] * 6 + [(3, "train")] * 12
    assert [r["policy_version"] for r in rows] == [0] * 12 + [2] * 18
