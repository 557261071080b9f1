"""NaN and inf in a live slot: noticed before the optimizer step, and named."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from lightrl.distributed import all_objects, rank
from lightrl.meter import Meter
from lightrl.packing import MicroBatch
from lightrl.rollout_state import rollout_to_state
from lightrl.types import Rollout

_NOTED = "nonfinite micro-batches"
_SHOWN_TOKENS = 8
_ELSEWHERE = "another rank names the rollout"


class FiniteCheck:
    """Looks at the micro-batches of one step without waiting for the device: its note travels with the metrics.

    So every rank learns of it in the reduction that the metrics need anyway, and all raise together.
    """

    def __init__(self) -> None:
        self._seen: list[tuple[MicroBatch, Tensor, Tensor]] = []

    def note(self, micro: MicroBatch, logprobs: Tensor, loss: Tensor, meter: Meter) -> None:
        """Note whether the scalar ``loss`` or a live slot of what it may be made of, [N], is NaN or inf.

        The loss alone would not tell: clamped ratios make a huge finite one of an infinite logprob.
        """
        good = loss.isfinite()
        for values in _tensors(micro, logprobs).values():
            good = good & (values.isfinite() | ~micro.loss_mask).all()
        meter.add_sum(_NOTED, (~good).double(), 1.0)
        self._seen.append((micro, logprobs, loss))

    def noted(self, means: dict[str, float]) -> bool:
        """Take the note out of the reduced ``means``; whether any rank made one."""
        return bool(means.pop(_NOTED))

    def error(self, rollouts: list[Rollout], step: int, folder: Path) -> RuntimeError:
        """Return what to raise; a rank that has something to show writes its micro-batches and rollouts to a file.

        Args:
            rollouts: of the step, on this rank.
            step: optimizer steps done.
            folder: for the file, which ``torch.load`` reads with ``weights_only=True``.
        """
        where = next((w for seen in self._seen if (w := _find(*seen, rollouts))), None)
        if where is None:
            return _error(step, f"in the loss: {_ELSEWHERE}")
        path = folder / f"nonfinite-step={step}-rank={rank()}.pt"
        micro = [_tensors(m, logprobs) | {"input_ids": m.input_ids, "loss": loss} for m, logprobs, loss in self._seen]
        folder.mkdir(parents=True, exist_ok=True)
        torch.save({"step": step, "micro_batches": micro, "rollouts": [rollout_to_state(r) for r in rollouts]}, path)
        return _error(step, f"in the loss: {where}", f" What the step was made of is in {path}.")


def check_rewarded_logprobs(rollouts: list[Rollout], step: int) -> None:
    """Raise RuntimeError where a logprob that goes into a scored rollout's reward is NaN or inf, on any rank.

    Later would be too late: a reward that is NaN means that nobody scored the rollout. All ranks call it together.
    """
    found: list[str] = []
    for i, r in enumerate(rollouts):
        for name in ("old_logprobs", "ref_logprobs"):
            values = getattr(r, name)
            if r.reward is None or values is None:
                continue
            bad = ~values.isfinite() if r.loss_mask is None else ~values.isfinite() & r.loss_mask
            if bool(bad.any()):
                token = int(bad.nonzero()[0])
                where = f"rollout {i} ({_shown([*r.prompt_ids, *r.completion_ids])})"
                found.append(f"{name} is {float(values[token])} at completion token {token} of {where}")
    if any(all_objects(bool(found))):
        raise _error(step, f"in the KL of the reward: {found[0] if found else _ELSEWHERE}")


def _error(step: int, where: str, more: str = "") -> RuntimeError:
    return RuntimeError(
        f"step {step}: NaN or inf among the tokens that count {where}. The weights are still those of before this "
        f"step.{more}"
    )


def _tensors(micro: MicroBatch, logprobs: Tensor) -> dict[str, Tensor]:
    names = ("advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs")
    found = {"logprobs": logprobs} | {name: getattr(micro, name) for name in names}
    return {name: values for name, values in found.items() if values is not None}


def _find(micro: MicroBatch, logprobs: Tensor, loss: Tensor, rollouts: list[Rollout]) -> str | None:
    for name, values in _tensors(micro, logprobs).items():
        bad = (~values.isfinite() & micro.loss_mask).nonzero().flatten().tolist()
        if bad:
            sequence = int(micro.sequence_ids[bad[0]])
            token = bad[0] - int((micro.sequence_ids < sequence).sum())
            return (
                f"{name} is {float(values[bad[0]])} at completion token {token} of {_name(micro, sequence, rollouts)}"
            )
    if bool(loss.isfinite()):
        return None
    return f"loss is {float(loss)} in the micro-batch that begins with {_name(micro, 0, rollouts)}"


def _name(micro: MicroBatch, sequence: int, rollouts: list[Rollout]) -> str:
    ids = [token for span in micro.sequences()[sequence] for token in micro.input_ids[span].tolist()]
    matches = (i for i, r in enumerate(rollouts) if [*r.prompt_ids, *r.completion_ids] == ids)
    return f"rollout {next(matches, sequence)} ({_shown(ids)})"


def _shown(ids: list[int]) -> str:
    return "token ids " + ", ".join(map(str, ids[:_SHOWN_TOKENS])) + (", ..." if len(ids) > _SHOWN_TOKENS else "")
