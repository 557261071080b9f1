"""Rollouts to a micro-batch: sequences end to end in one row, what those of a group share laid down once."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from lightrl.layout import SequenceLayout
from lightrl.prefix import by_group
from lightrl.types import Rollout


@dataclass(slots=True)
class MicroBatch:
    """S rollouts end to end in a row of T tokens, in which a shared prefix lies once.

    Per-token tensors are flat, [N]: the completion tokens, rollout after rollout, whatever is shared.

    Example:
        Prompts [5, 6] and [8], completions [7, 2] and [9]: ``input_ids`` is [5, 6, 7, 2, 8, 9], ``targets`` [7, 2, 9],
        ``logit_index`` [1, 2, 4] (the token before each target), ``sequence_ids`` [0, 0, 1].
        Shared, prompt [5, 6] with completions [7, 2] and [9]: ``input_ids`` is [5, 6, 7, 2, 9], ``lengths`` [2, 2, 1],
        ``prefixes`` [-1, 0, 0], ``position_ids`` [0, 1, 2, 3, 2], ``logit_index`` [1, 2, 1].
    """

    lengths: list[int]
    """Tokens in each piece of the row: a whole sequence, a shared prefix, or what follows one; their sum is T."""
    prefixes: list[int]
    """For each piece, the earlier piece that it continues, or -1."""
    input_ids: Tensor
    """int64 [T]."""
    position_ids: Tensor
    """int64 [T]: from 0 in each sequence, shared prefix included."""
    logit_index: Tensor
    """int64 [N]: position in the row whose logits predict the token."""
    targets: Tensor
    """int64 [N]: completion tokens."""
    sequence_ids: Tensor
    """int64 [N], ascending: which of the S sequences a token belongs to."""
    loss_mask: Tensor
    """bool [N]: False keeps a token out of loss and metrics."""
    advantages: Tensor
    """float32 [N]."""
    rollout_logprobs: Tensor
    """float32 [N]: the sampler's."""
    old_logprobs: Tensor | None
    """float32 [N]: the trainer's before the first update, or None where these are the current ones."""
    ref_logprobs: Tensor | None
    """float32 [N]: the frozen reference's, where there is one."""
    policy_versions: Tensor
    """int64 [N]: optimizer steps done by the weights that sampled the token."""
    temperature: float = 1.0
    """Sampling temperature: logprobs are of softmax(logits / temperature)."""
    denominator: float = 1.0
    """What a sum over this and all other micro-batches of the step, on all ranks, is divided by."""
    values: Tensor | None = None
    """float32 [N]: the critic's before the first update, where there is a critic."""
    returns: Tensor | None = None
    """float32 [N]: what its values are drawn to."""

    def to(self, device: torch.device | str) -> Self:
        """Return a copy with every tensor on ``device``."""
        moved: dict[str, Any] = {
            f.name: v.to(device) for f in fields(self) if isinstance(v := getattr(self, f.name), Tensor)
        }
        return replace(self, **moved)

    def layout(self) -> SequenceLayout:
        """Borders of the pieces, for the attention."""
        return SequenceLayout(self.lengths, self.input_ids.device, self.prefixes)

    def sequences(self) -> list[list[slice]]:
        """Return where each of the S sequences lies in the row: its one or two pieces."""
        ends = list(itertools.accumulate(self.lengths))
        spans = [slice(end - length, end) for end, length in zip(ends, self.lengths, strict=True)]
        shared = set(self.prefixes)
        return [[spans[p], spans[i]] if p >= 0 else [spans[i]] for i, p in enumerate(self.prefixes) if i not in shared]

    def by_sequence(self) -> dict[str, Any]:
        """Return what functions of whole sequences want to know, by argument name.

        ``num_sequences`` is counted on the host, in pieces that no other continues: a GPU need not be asked.
        """
        count = len(self.lengths) - len({p for p in self.prefixes if p >= 0})
        return {"sequence_ids": self.sequence_ids, "loss_mask": self.loss_mask, "num_sequences": count}

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences, a shared prefix counted for each that has it."""
        return sum(s.stop - s.start for spans in self.sequences() for s in spans)


@dataclass(slots=True)
class StepBatch:
    """One optimizer step's rollouts for this rank, cut into micro-batches; the same number of them on every rank."""

    micro: list[MicroBatch]
    policy_version: int
    """Optimizer steps done by the oldest weights that sampled these rollouts."""
    rollouts: list[Rollout] = field(default_factory=list)
    """The rollouts behind the micro-batches, for callbacks."""
    times_used: int = 0
    """Optimizer steps on the same batch of rollouts before this one: 0 where they are new."""
    measured: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Metric name to (sum, count) on this rank, of what was measured while the rollouts were made."""

    def to(self, device: torch.device | str) -> StepBatch:
        """Return a copy with every micro-batch on ``device``."""
        return replace(self, micro=[m.to(device) for m in self.micro])


def pack(
    rollouts: list[Rollout], *, temperature: float, denominator: float = 1.0, share_prefix: bool = False
) -> MicroBatch:
    """Lay rollouts end to end.

    Args:
        rollouts: at least one; each with at least one prompt token and one completion token.
        temperature: sampling temperature, above 0.
        denominator: see :class:`MicroBatch`.
        share_prefix: lay down once what rollouts with one ``group_id`` begin with; for models that take packed rows.

    Returns:
        A micro-batch on the CPU. ``old_logprobs`` and ``ref_logprobs`` are there if every rollout has been scored.

    Raises:
        ValueError: there are no rollouts, a prompt or a completion is empty, something has not one entry for each
            completion token, or the temperature is not above 0.
    """
    if not rollouts:
        raise ValueError("pack([]): a micro-batch needs a rollout; lightrl.packing.idle_rollout() counts for nothing")
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature={temperature} must be above 0: pass the one that the rollouts were sampled at")
    for r in rollouts:
        _check(r)
    row = _Row(rollouts, share_prefix)
    scored = all(r.scored_logprobs is not None for r in rollouts)
    return MicroBatch(
        lengths=row.lengths,
        prefixes=row.prefixes,
        input_ids=torch.tensor(row.ids),
        position_ids=torch.cat(row.positions),
        logit_index=torch.cat(row.logit_index),
        targets=torch.tensor([t for r in rollouts for t in r.completion_ids]),
        sequence_ids=torch.repeat_interleave(torch.tensor([len(r.completion_ids) for r in rollouts])),
        loss_mask=torch.cat([completion_mask(r) for r in rollouts]),
        advantages=torch.cat([_per_token(r.advantage, len(r.completion_ids)) for r in rollouts]),
        rollout_logprobs=torch.cat([r.rollout_logprobs for r in rollouts]).float(),
        old_logprobs=torch.cat([r.old_logprobs for r in rollouts]).float() if scored else None,
        ref_logprobs=_joined([r.ref_logprobs for r in rollouts]),
        policy_versions=torch.cat([_versions(r) for r in rollouts]),
        temperature=temperature,
        denominator=denominator,
        values=_joined([r.values for r in rollouts]),
        returns=_joined([r.returns for r in rollouts]),
    )


def _check(r: Rollout) -> None:
    """Raise ValueError where lengths do not fit: two that are wrong in opposite ways would make up for each other."""
    size = len(r.completion_ids)
    if not r.prompt_ids or not size:
        raise ValueError(
            f"a rollout has {len(r.prompt_ids)} prompt and {size} completion tokens: the first completion token is "
            "predicted from the last prompt token, so each needs at least one"
        )
    found = {name: getattr(r, name) for name in ("rollout_logprobs", "loss_mask", "scored_logprobs", "ref_logprobs")}
    found["policy_versions"] = r.policy_versions if len(r.policy_versions) else None
    found["advantage"] = r.advantage if isinstance(r.advantage, Tensor) and r.advantage.ndim else None
    for name, values in found.items():
        if values is not None and values.shape != (size,):
            raise ValueError(
                f"{name} of a rollout has shape {list(values.shape)}, but its completion has {size} tokens: it must be "
                f"[{size}], one entry for each" + (", or a single number" if name == "advantage" else "")
            )


class _Row:
    """The pieces of a packed row, and where the logits of each completion token are."""

    def __init__(self, rollouts: list[Rollout], share_prefix: bool) -> None:
        self.ids: list[int] = []
        self.lengths: list[int] = []
        self.prefixes: list[int] = []
        self.positions: list[Tensor] = []
        self.logit_index: list[Tensor] = []
        groups = by_group(rollouts) if share_prefix else []
        shared = {i: (group, size) for group, (indices, size) in enumerate(groups) if size for i in indices}
        laid: dict[int, tuple[int, int]] = {}
        for i, r in enumerate(rollouts):
            group, size = shared.get(i, (-1, 0))
            ids = r.prompt_ids + r.completion_ids
            if size and group not in laid:
                laid[group] = self._lay(ids[:size], 0, -1)
            piece, prefix_start = laid[group] if size else (-1, 0)
            _, start = self._lay(ids[size:], size, piece)
            at = torch.arange(len(r.prompt_ids) - 1, len(ids) - 1)
            self.logit_index.append(at + torch.where(at < size, prefix_start, start - size))

    def _lay(self, ids: list[int], position: int, prefix: int) -> tuple[int, int]:
        """Append a piece; return its number and where it starts."""
        start = len(self.ids)
        self.ids += ids
        self.lengths.append(len(ids))
        self.prefixes.append(prefix)
        self.positions.append(torch.arange(position, position + len(ids)))
        return len(self.lengths) - 1, start


def completion_mask(r: Rollout) -> Tensor:
    """Return which completion tokens count, bool [C]."""
    return torch.ones(len(r.completion_ids), dtype=torch.bool) if r.loss_mask is None else r.loss_mask


def _joined(pieces: list[Tensor | None]) -> Tensor | None:
    there = [piece for piece in pieces if piece is not None]
    return torch.cat(there) if len(there) == len(pieces) else None


def _per_token(advantage: float | Tensor, size: int) -> Tensor:
    return torch.as_tensor(advantage, dtype=torch.float32).expand(size)


def _versions(r: Rollout) -> Tensor:
    return r.policy_versions if len(r.policy_versions) else torch.zeros(len(r.completion_ids), dtype=torch.int64)


def live_tokens(rollouts: list[Rollout]) -> int:
    """Number of tokens that count in the loss."""
    return sum(len(r.completion_ids) if r.loss_mask is None else int(r.loss_mask.sum()) for r in rollouts)


def idle_rollout() -> Rollout:
    """A rollout that costs two tokens and counts for nothing: a rank with nothing to train takes part with it."""
    nothing = torch.zeros(1)
    dead = torch.zeros(1, dtype=torch.bool)
    scores: dict[str, Any] = dict.fromkeys(("scored_logprobs", "ref_logprobs", "values", "returns"), nothing)
    return Rollout([0], [0], nothing, loss_mask=dead, **scores)


def shuffled_parts(rollouts: list[Rollout], parts: int, seed: int) -> list[list[Rollout]]:
    """Shuffle by ``seed`` and cut into ``parts`` mini-batches whose sizes differ by one at most."""
    order = list(rollouts)
    random.Random(seed).shuffle(order)
    return [order[i::parts] for i in range(parts)]
