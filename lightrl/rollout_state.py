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
        "groups": [
            {"prompt": g.prompt.token_ids, "index": g.prompt.index, "rollouts": [_plain(r) for r in g.rollouts]}
            for g in batch.groups
        ],
    }


def rollouts_from_state(state: dict[str, Any] | None) -> RolloutBatch | None:
    """Return the batch that ``state`` was made of."""
    if state is None:
        return None
    groups = [
        RolloutGroup(Prompt(g["prompt"], index=g["index"]), [Rollout(**r) for r in g["rollouts"]])
        for g in state["groups"]
    ]
    return RolloutBatch(groups, state["policy_version"], state["temperature"])


def _plain(rollout: Rollout) -> dict[str, Any]:
    return {f.name: getattr(rollout, f.name) for f in fields(rollout)}
