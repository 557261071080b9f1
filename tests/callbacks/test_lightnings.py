"""Lightning's own callbacks: those that the documentation says work do, and the others do what it says."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, callbacks
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightrl import RLModule
from tests.helpers.fits import quiet_trainer, tiny_data, whole_weights
from tests.helpers.tiny import tiny_model, tiny_prompts


class StopError(Exception):
    pass


class StopAfter(Callback):
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        raise StopError


def trained(folder: Path, *added: Callback, logger: Any = False, **args: Any) -> tuple[dict[str, torch.Tensor], Any]:
    module = RLModule(tiny_model(), lr=0.02)
    trainer = quiet_trainer(
        "colocated_hf", callbacks=list(added), default_root_dir=folder, logger=logger, **{"max_epochs": 3, **args}
    )
    trainer.fit(module, tiny_data(tiny_prompts(8), val_prompts=tiny_prompts(4)))
    return whole_weights(module), trainer


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(weight, other[name]) for name, weight in one.items())


@pytest.mark.slow
def test_those_that_watch_change_nothing(tmp_path: Path) -> None:
    best = callbacks.ModelCheckpoint(
        tmp_path / "best", "{step}-{val/reward:.3f}", "val/reward", mode="max", auto_insert_metric_name=False
    )
    seen: list[int] = []
    watchers = [
        best,
        callbacks.EarlyStopping("val/reward", mode="max", patience=50),
        callbacks.LearningRateMonitor(),
        callbacks.DeviceStatsMonitor(cpu_stats=True),
        callbacks.Timer(timedelta(hours=1)),
        callbacks.RichModelSummary(),
        callbacks.RichProgressBar(),
        callbacks.SpikeDetection(warmup=1),
        callbacks.ThroughputMonitor(batch_size_fn=lambda batch: len(batch.rollouts)),
        callbacks.LambdaCallback(on_train_batch_end=lambda trainer, *_: seen.append(trainer.global_step)),
    ]
    args = {"enable_checkpointing": True, "enable_progress_bar": True, "enable_model_summary": True}
    logger = CSVLogger(tmp_path)
    watched, _ = trained(tmp_path, *watchers, logger=logger, log_every_n_steps=1, **args)
    assert same(watched, trained(tmp_path)[0])
    assert [p.name for p in (tmp_path / "best").iterdir()] == [Path(best.best_model_path).name]
    assert seen == list(range(1, 7))
    header = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()[0]
    assert {"lr-AdamW/pg1", "train/samples"} <= set(header.split(","))


def test_those_that_stop_stop(tmp_path: Path) -> None:
    stopped = callbacks.EarlyStopping("val/reward", mode="max", patience=1, min_delta=2.0)
    assert trained(tmp_path, stopped)[1].current_epoch == 2
    saved = callbacks.OnExceptionCheckpoint(tmp_path, "failed")
    with pytest.raises(StopError):
        trained(tmp_path, saved, StopAfter(), enable_checkpointing=True)
    assert (tmp_path / "failed.ckpt").is_file()


def test_stochastic_weight_averaging_averages_nothing(tmp_path: Path) -> None:
    averaging = callbacks.StochasticWeightAveraging(0.02, swa_epoch_start=1)
    trained(tmp_path, averaging)
    assert averaging.n_averaged is not None
    assert averaging.n_averaged > 0
    assert not list(averaging._average_model.parameters())  # type: ignore[union-attr]


def test_gradient_accumulation_by_schedule_loses_gradients(tmp_path: Path) -> None:
    _, trainer = trained(tmp_path, callbacks.GradientAccumulationScheduler({0: 2}))
    assert trainer.global_step == 3  # of six batches


class Freeze(callbacks.BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.policy)


@pytest.mark.parametrize(
    ("callback", "error", "message"),
    [
        (callbacks.WeightAveraging, RuntimeError, "mixed torch.Tensor and DTensor"),
        (callbacks.EMAWeightAveraging, RuntimeError, "mixed torch.Tensor and DTensor"),
        (callbacks.BatchSizeFinder, MisconfigurationException, "distributed strategies"),
        (lambda: callbacks.LearningRateFinder(num_training_steps=3), ValueError, "Could not find a distributed model"),
        (lambda: callbacks.ModelPruning("l1_unstructured", amount=0.5), ValueError, "non-empty list of Tensors"),
        (Freeze, AttributeError, "no attribute 'policy'"),
        (callbacks.BackboneFinetuning, AttributeError, "no attribute 'backbone'"),
    ],
)
def test_those_that_cannot_work_end_with_an_error(callback: Any, error: type, message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        trained(tmp_path, callback(), max_epochs=1)
