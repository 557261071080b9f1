"""Rollout batches as plain builtins and tensors, for checkpoints that load with ``weights_only=True``."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from lightrl.types import Prompt, Rollout, RolloutBatch, RolloutGroup


def rollouts_to_state(batch: RolloutBatch | None) -> dict[str, Any] | None:
    """Return ``batch`` as dicts, lists, numbers, strings and tensors; prompts keep their ids and row only."""
    if batch is None:
        return None
    return {
        "policy_version": batch.policy_version,
        "temperature": batch.temperature,
        "max_completion_tokens": batch.max_completion_tokens,
        "groups": [group_to_state(g) for g in batch.groups],
    }


def rollouts_from_state(state: dict[str, Any] | None) -> RolloutBatch | None:
    """Return the batch that ``state`` was made of."""
    if state is None:
        return None
    groups = [group_from_state(g) for g in state["groups"]]
    longest = state.get("max_completion_tokens", 0)  # older checkpoints do not have it
    return RolloutBatch(groups, state["policy_version"], state["temperature"], max_completion_tokens=longest)


def deal_anew(states: list[dict[str, Any] | None], ranks: int) -> list[dict[str, Any] | None]:
    """Return states of ``ranks`` batches with the groups of those that were of another number of ranks."""
    whole = [s for s in states if s is not None]
    groups = [group for state in whole for group in state["groups"]]
    return [whole[0] | {"groups": groups[r::ranks]} if whole else None for r in range(ranks)]


def deal_sums_anew(sums: list[dict[str, tuple[float, float]]], ranks: int) -> list[dict[str, tuple[float, float]]]:
    """Return (sum, count) by name for each of ``ranks`` ranks; over all ranks together they are what they were."""
    total = {name: tuple(map(sum, zip(*(s[name] for s in sums), strict=True))) for name in sums[0]}
    nothing = dict.fromkeys(total, (0.0, 0.0))
    return [total if r == 0 else nothing for r in range(ranks)]  # type: ignore[misc]


def group_to_state(group: RolloutGroup) -> dict[str, Any]:
    """Return ``group`` as dicts, lists, numbers, strings and tensors."""
    prompt = group.prompt
    return {
        "prompt": prompt.token_ids,
        "index": prompt.index,
        "rollouts": [rollout_to_state(r) for r in group.rollouts],
    }


def group_from_state(state: dict[str, Any]) -> RolloutGroup:
    """Return the group that ``state`` was made of."""
    return RolloutGroup(Prompt(state["prompt"], index=state["index"]), [Rollout(**r) for r in state["rollouts"]])


def rollout_to_state(rollout: Rollout) -> dict[str, Any]:
    """Return ``rollout`` as a dict of lists, numbers, strings and tensors."""
    return {f.name: getattr(rollout, f.name) for f in fields(rollout)}
