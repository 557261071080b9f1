"""What a ``vllm.LLM`` returned, as rollouts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lightrl.rewards import RewardSum
from lightrl.types import Prompt, Rollout, RolloutBatch, RolloutGroup


def parse_vllm_outputs(
    outputs: Sequence[Any],
    group_size: int,
    reward_fn: Callable[..., Any] | None = None,
    ground_truths: Sequence[Any] | None = None,
) -> list[RolloutBatch]:
    """Return one batch of one group for each prompt, token ids and logprobs as they were sampled.

    Args:
        outputs: of ``LLM.generate`` or ``LLM.chat`` with ``SamplingParams(n=group_size, logprobs=0)`` or more logprobs,
            or with each prompt ``group_size`` times in a row.
        group_size: completions of each prompt.
        reward_fn: ``reward(completion, ground_truth) -> float``, in any form that
            :class:`~lightrl.rewards.RewardSum` takes; ``prompt`` is the prompt as text. None: the caller sets rewards.
        ground_truths: one for each group.

    Raises:
        ValueError: the completions do not fall into groups of ``group_size``, have no logprobs, or are unfinished; or
            there are more or fewer ground truths than groups.
        RuntimeError: the reward raised; it is named with its input.
    """
    samples = [(output, sample) for output in outputs for sample in output.outputs]
    if group_size < 1 or len(samples) % group_size:
        raise ValueError(f"group_size={group_size} does not divide the {len(samples)} completions into groups")
    starts = range(0, len(samples), group_size)
    if ground_truths is not None and len(ground_truths) != len(starts):
        raise ValueError(f"{len(ground_truths)} ground_truths for {len(starts)} groups: give one for each")
    truths = ground_truths if ground_truths is not None else [None] * len(starts)
    groups = [_group(samples[i : i + group_size], i // group_size, t) for i, t in zip(starts, truths, strict=True)]
    if reward_fn is not None:
        _score(groups, RewardSum(reward_fn), has_truths=ground_truths is not None)
    return [RolloutBatch([group]) for group in groups]


def _group(samples: list[tuple[Any, Any]], index: int, ground_truth: Any) -> RolloutGroup:
    first = samples[0][0]
    ids = list(first.prompt_token_ids)
    if any(list(output.prompt_token_ids) != ids for output, _ in samples):
        raise ValueError(
            f"group {index} has completions of different prompts: sample with SamplingParams(n={len(samples)}), or "
            f"give each prompt {len(samples)} times in a row"
        )
    text = first.prompt or ""
    prompt = Prompt(ids, ground_truth, columns={"prompt": text}, index=index, text=text)
    return RolloutGroup(prompt, [_rollout(ids, sample, index) for _, sample in samples])


def _rollout(prompt_ids: list[int], sample: Any, group_id: int) -> Rollout:
    ids = list(sample.token_ids)
    if sample.finish_reason not in ("stop", "length"):
        raise ValueError(f"group {group_id}: vLLM ended a completion with finish_reason={sample.finish_reason!r}")
    if sample.logprobs is None:
        raise ValueError(f"group {group_id} has no logprobs: sample with SamplingParams(logprobs=0) or more")
    return Rollout(
        prompt_ids=prompt_ids,
        completion_ids=ids,
        rollout_logprobs=torch.tensor([row[i].logprob for row, i in zip(sample.logprobs, ids, strict=True)]),
        truncated=sample.finish_reason == "length",
        text=sample.text or "",
        group_id=group_id,
    )


def _score(groups: list[RolloutGroup], rewards: RewardSum, *, has_truths: bool) -> None:
    if not has_truths and any(term.second is not None and term.second != "prompt" for term in rewards.terms):
        warnings.warn(
            "reward_fn takes a ground truth and none was given: it gets None. Pass ground_truths=[...]", stacklevel=3
        )
    rollouts = [r for g in groups for r in g.rollouts]
    owners = [g.prompt for g in groups for _ in g.rollouts]
    try:
        scores = rewards.score([r.text for r in rollouts], owners, [r.completion_ids for r in rollouts])
    finally:
        rewards.close()
    for rollout, score in zip(rollouts, scores, strict=True):
        rollout.reward, rollout.reward_terms = score.total, score.terms
