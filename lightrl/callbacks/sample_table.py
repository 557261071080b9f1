"""Sample completions, now and then, where a person looks."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TextIO

from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_only
from typing_extensions import override

from lightrl.arguments import check_at_least_one
from lightrl.packing import StepBatch
from lightrl.types import Rollout

if TYPE_CHECKING:
    import lightning.pytorch as pl

_WIDTH = 48


class SampleTable(Callback):
    """Prints a table of completions with their rewards (:class:`~lightrl.callbacks.RolloutLogger` keeps them).

    Args:
        every_n_steps: optimizer steps between two tables; the first is printed at the first step.
        rows: completions in a table, best and worst first.
        file: where to print; None: standard output.

    Raises:
        ValueError: an argument is below 1.
    """

    def __init__(self, every_n_steps: int = 50, rows: int = 4, file: TextIO | None = None) -> None:
        check_at_least_one(every_n_steps=every_n_steps, rows=rows)
        self.every_n_steps, self.rows, self.file = every_n_steps, rows, file

    @override
    @rank_zero_only
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: StepBatch, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if (step - 1) % self.every_n_steps or not batch.rollouts:
            return
        data: Any = getattr(trainer, "datamodule", None)
        tokenizer = getattr(data, "tokenizer", None) or pl_module.tokenizer
        table = sample_table(batch.rollouts, tokenizer, self.rows)
        print(f"\nsamples at step {step}\n{table}", file=self.file or sys.stdout, flush=True)


def sample_table(rollouts: list[Rollout], tokenizer: Any, rows: int) -> str:
    """Return ``rows`` rollouts from worst to best as lines of text: reward, prompt's end, completion's beginning."""
    lines = [f"{'reward':>8}  {'prompt':<{_WIDTH}}  completion"]
    for r in spread(rollouts, rows):
        prompt = _line(tokenizer.decode(r.prompt_ids, skip_special_tokens=True))[-_WIDTH:]
        reward = "-" if r.reward is None else f"{r.reward:.3f}"
        lines.append(f"{reward:>8}  {prompt:<{_WIDTH}}  {_line(r.text)[:_WIDTH]}{' ...' if r.truncated else ''}")
    return "\n".join(lines)


def spread(rollouts: list[Rollout], count: int) -> list[Rollout]:
    """Return ``count`` rollouts in even steps from the worst to the best, or all where there are fewer."""
    count = min(count, len(rollouts))
    scored = sorted(rollouts, key=lambda r: (r.reward is None, r.reward or 0.0))
    step = max(1, (len(scored) - 1) // max(1, count - 1))
    return (scored[::step][: count - 1] + scored[-1:]) if count > 1 else scored[-1:]


def _line(text: str) -> str:
    line = " ".join(text.split())
    return "".join(c if c.isprintable() else "\ufffd" for c in line)  # escape sequences would reach the terminal
