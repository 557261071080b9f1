"""Draw docs/images/demo.png: the demo's learning curve, and where the time of its steps goes."""

import tempfile
from pathlib import Path
from typing import Any

import matplotlib
from lightning.pytorch import seed_everything
from lightning.pytorch.loggers import TensorBoardLogger
from matplotlib.figure import Figure

from examples.tiny.curve import draw_rewards
from examples.tiny.run import MAX_STEPS
from examples.tiny.task import write_task
from examples.tiny.training import make_data, make_trainer
from lightrl import RLModule
from lightrl.callbacks import ThroughputMonitor
from lightrl.floors import STAGES
from lightrl.report import read_scalars

PICTURE = Path(__file__).resolve().parent.parent / "docs/images/demo.png"
COLOURS = ("#4c78a8", "#54a24b", "#f58518", "#e45756", "#b279a2", "#9d755d", "#bab0ac")


def train(folder: Path) -> str:
    seed_everything(0, verbose=False)
    task, logger = write_task(folder), TensorBoardLogger(folder, name="")
    callbacks = [ThroughputMonitor()]
    trainer = make_trainer("colocated_vllm", MAX_STEPS, samples_every=None, logger=logger, callbacks=callbacks)
    trainer.fit(RLModule(task.model_dir, lr=1e-3, schedule="linear"), make_data(task))
    return logger.log_dir


def draw_split(axes: Any, scalars: dict[str, Any]) -> None:
    """A bar whose parts are the mean shares of a step, the first, which warms up, left out."""
    left = 0.0
    for stage, colour in zip(STAGES, COLOURS, strict=True):
        share = sum(scalars[f"split/{stage}"][1][1:]) / (len(scalars[f"split/{stage}"][1]) - 1)
        axes.barh(0, share, left=left, color=colour, label=f"{stage} {share:.0%}")
        left += share
    axes.set(title="Where the time of a step goes", xlim=(0, 1), ylim=(-0.5, 0.5), yticks=[], xticks=[])
    axes.spines[:].set_visible(False)
    axes.legend(ncols=len(STAGES), loc="upper center", bbox_to_anchor=(0.5, 0.02), frameon=False, fontsize=8)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        scalars = read_scalars(train(Path(folder)))
    with matplotlib.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(8, 5), layout="constrained")
        curve, split = figure.subplots(2, 1, height_ratios=[5, 1])
        draw_rewards(curve, scalars, "A tiny model learns to find the largest of three digits")
        draw_split(split, scalars)
        figure.savefig(PICTURE, dpi=130)
    print(PICTURE)


if __name__ == "__main__":
    main()
