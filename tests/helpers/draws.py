"""vLLM's seeded draws done again, by its own sampler on logits of ours: was a token a close thing?"""

from typing import Any

import torch

from lightrl.rng import derive_seed
from lightrl.types import Rollout

TIE = 1e-3
"""A draw is a near tie where so small a change of one logit gives another token."""


def seed_of(run_seed: int, batch: int, place: int, member: int) -> int:
    """Of a training completion with ``deterministic=True``."""
    return derive_seed(derive_seed(derive_seed(run_seed, "train", batch), place), member)


def draw(policy: Any, rollout: Rollout, position: int, seed: int, less: dict[int, float] | None = None) -> int:
    """The token at ``position`` of a completion; ``less`` is taken off the logits of these tokens."""
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    sampler = TopKTopPSampler("processed_logprobs")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        ids = torch.tensor([rollout.prompt_ids + rollout.completion_ids[:position]])
        logits = policy(ids).logits[0, -1:]
    for token, size in (less or {}).items():
        logits[0, token] -= size
    with torch.random.fork_rng():
        for _ in range(position + 1):  # one draw for each token before it
            drawn, _ = sampler(logits.clone(), {0: generator}, None, None)
    return int(drawn)


def is_near_tie(policy: Any, rollout: Rollout, position: int, seed: int, other: int, tie: float = TIE) -> bool:
    """Whether the draw falls to this token rather than the ``other``, or the other way round, by a hair."""
    drawn = draw(policy, rollout, position, seed)
    return {drawn, draw(policy, rollout, position, seed, {drawn: tie})} == {rollout.completion_ids[position], other}


def first_difference(ours: list[list[Rollout]], theirs: list[list[Rollout]]) -> tuple[int, int, int] | None:
    """(step, rollout in it, position) of the first token in which two runs differ."""
    for step, pair in enumerate(zip(ours, theirs, strict=True)):
        for i, (a, b) in enumerate(zip(*pair, strict=True)):
            if a.completion_ids != b.completion_ids:
                tokens = zip(a.completion_ids, b.completion_ids, strict=False)
                same = next((j for j, (x, y) in enumerate(tokens) if x != y), None)
                assert same is not None, "one is the beginning of the other"
                return step, i, same
    return None
