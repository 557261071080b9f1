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


def group_to_state(group: RolloutGroup) -> dict[str, Any]:
    """Return ``group`` as dicts, lists, numbers, strings and tensors."""
    prompt = group.prompt
    return {"prompt": prompt.token_ids, "index": prompt.index, "rollouts": [_plain(r) for r in group.rollouts]}


def group_from_state(state: dict[str, Any]) -> RolloutGroup:
    """Return the group that ``state`` was made of."""
    return RolloutGroup(Prompt(state["prompt"], index=state["index"]), [Rollout(**r) for r in state["rollouts"]])


def _plain(rollout: Rollout) -> dict[str, Any]:
    return {f.name: getattr(rollout, f.name) for f in fields(rollout)}
