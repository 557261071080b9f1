"""Rollouts to micro-batches: sequences end to end in one row, as many rows as the token budget needs."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from lightrl.attention import SequenceLayout
from lightrl.distributed import all_objects
from lightrl.types import Rollout


@dataclass(slots=True)
class MicroBatch:
    """S rollouts end to end: T tokens, N of them completion tokens, whose per-token tensors are flat, [N].

    Example:
        Prompts [5, 6] and [8], completions [7, 2] and [9]: ``input_ids`` is [5, 6, 7, 2, 8, 9], ``targets`` [7, 2, 9],
        ``logit_index`` [1, 2, 4] (the token before each target), ``sequence_ids`` [0, 0, 1].
    """

    lengths: list[int]
    """S sequence lengths, prompt included; their sum is T."""
    input_ids: Tensor
    """int64 [T]."""
    position_ids: Tensor
    """int64 [T]: from 0 in each sequence."""
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

    def to(self, device: torch.device | str) -> Self:
        """Return a copy with every tensor on ``device``."""
        moved: dict[str, Any] = {
            f.name: v.to(device) for f in fields(self) if isinstance(v := getattr(self, f.name), Tensor)
        }
        return replace(self, **moved)

    def layout(self) -> SequenceLayout:
        """Borders of the sequences, for the attention."""
        return SequenceLayout(self.lengths, self.input_ids.device)


@dataclass(slots=True)
class StepBatch:
    """One optimizer step's rollouts for this rank, cut into micro-batches; the same number of them on every rank."""

    micro: list[MicroBatch]
    policy_version: int
    """Optimizer steps done by the oldest weights that sampled these rollouts."""
    rollouts: list[Rollout] = field(default_factory=list)
    """The rollouts behind the micro-batches, for callbacks."""
    measured: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Metric name to (sum, count) on this rank, of what was measured while the rollouts were made."""

    def to(self, device: torch.device | str) -> StepBatch:
        """Return a copy with every micro-batch on ``device``."""
        return replace(self, micro=[m.to(device) for m in self.micro])


def pack(rollouts: list[Rollout], *, temperature: float, denominator: float = 1.0) -> MicroBatch:
    """Lay rollouts end to end.

    Args:
        rollouts: at least one; each with at least one prompt token and one completion token.
        temperature: sampling temperature.
        denominator: see :class:`MicroBatch`.

    Returns:
        A micro-batch on the CPU. ``old_logprobs`` and ``ref_logprobs`` are there if every rollout has been scored.

    Raises:
        ValueError: a prompt or a completion is empty.
    """
    for r in rollouts:
        if not r.prompt_ids or not r.completion_ids:
            raise ValueError(
                f"a rollout has {len(r.prompt_ids)} prompt and {len(r.completion_ids)} completion tokens: "
                "the first completion token is predicted from the last prompt token, so each needs at least one"
            )
    sizes = torch.tensor([[len(r.prompt_ids), len(r.completion_ids)] for r in rollouts])
    lengths = sizes.sum(1)
    starts = lengths.cumsum(0) - lengths
    owner = torch.repeat_interleave(torch.arange(len(rollouts)), sizes[:, 1])
    within = torch.arange(int(sizes[:, 1].sum())) - (sizes[:, 1].cumsum(0) - sizes[:, 1])[owner]
    scored = all(r.scored_logprobs is not None for r in rollouts)
    referred = all(r.ref_logprobs is not None for r in rollouts)
    return MicroBatch(
        lengths=lengths.tolist(),
        input_ids=torch.tensor([t for r in rollouts for t in (*r.prompt_ids, *r.completion_ids)]),
        position_ids=torch.arange(int(lengths.sum())) - torch.repeat_interleave(starts, lengths),
        logit_index=(starts + sizes[:, 0])[owner] + within - 1,
        targets=torch.tensor([t for r in rollouts for t in r.completion_ids]),
        sequence_ids=owner,
        loss_mask=torch.cat([_mask(r) for r in rollouts]),
        advantages=torch.cat([_per_token(r.advantage, len(r.completion_ids)) for r in rollouts]),
        rollout_logprobs=torch.cat([r.rollout_logprobs for r in rollouts]).float(),
        old_logprobs=torch.cat([r.old_logprobs for r in rollouts]).float() if scored else None,
        ref_logprobs=torch.cat([r.ref_logprobs for r in rollouts if r.ref_logprobs is not None]) if referred else None,
        policy_versions=torch.cat([_versions(r) for r in rollouts]),
        temperature=temperature,
        denominator=denominator,
    )


def _mask(r: Rollout) -> Tensor:
    return torch.ones(len(r.completion_ids), dtype=torch.bool) if r.loss_mask is None else r.loss_mask


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
    return Rollout([0], [0], nothing, loss_mask=dead, scored_logprobs=nothing, ref_logprobs=nothing)


def num_bins(rollouts: list[Rollout], max_tokens: int) -> int:
    """How many micro-batches of at most ``max_tokens`` these rollouts need (at least one)."""
    bins = max(1, -(-sum(_size(r) for r in rollouts) // max_tokens))
    while max((sum(map(_size, b)) for b in split(rollouts, bins)), default=0) > max_tokens and bins < len(rollouts):
        bins += 1
    return bins


def split(rollouts: list[Rollout], bins: int) -> list[list[Rollout]]:
    """Cut rollouts into ``bins`` parts of about equal size in tokens (longest first into the emptiest part)."""
    parts: list[list[Rollout]] = [[] for _ in range(bins)]
    loads = [0] * bins
    for r in sorted(rollouts, key=_size, reverse=True):
        i = loads.index(min(loads))
        parts[i].append(r)
        loads[i] += _size(r)
    return [p or [idle_rollout()] for p in parts]


def _size(r: Rollout) -> int:
    return len(r.prompt_ids) + len(r.completion_ids)


def shuffled_parts(rollouts: list[Rollout], parts: int, seed: int) -> list[list[Rollout]]:
    """Shuffle by ``seed`` and cut into ``parts`` mini-batches whose sizes differ by one at most."""
    order = list(rollouts)
    random.Random(seed).shuffle(order)
    return [order[i::parts] for i in range(parts)]


def plan_micro_batches(rollouts: list[Rollout], max_tokens: int) -> list[list[Rollout]]:
    """Cut rollouts into parts of at most ``max_tokens``: as many on every rank as the neediest has (a collective)."""
    bins = max(all_objects(num_bins(rollouts, max_tokens)))
    return split(rollouts, bins)
