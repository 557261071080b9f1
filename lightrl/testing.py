"""Checks that users can run on their own algorithms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightrl.balance import Packer
from lightrl.packing import MicroBatch, live_tokens, pack
from lightrl.policy import PolicyForward

if TYPE_CHECKING:
    from lightrl.module import RLModule
    from lightrl.types import Rollout


def gradient_cuts(
    module: RLModule,
    rollouts: list[Rollout],
    *,
    max_micro_batches: int = 8,
    temperature: float = 1.0,
    max_completion_tokens: int | None = None,
    tolerance: float = 1e-5,
) -> float:
    """Check that a step's gradient does not depend on how its rollouts are cut into micro-batches.

    A ``loss`` that takes a mean over the micro-batch at hand fails; one that adds up its terms over
    ``batch.denominator`` (see :meth:`RLModule.aggregate`) passes. One padded batch is compared with 1 to
    ``max_micro_batches`` of them, padded, packed, and packed with shared prefixes, groups kept together or dealt out.

    Args:
        module: whose ``loss`` is checked, entropy bonus included, on the device that its policy is on; float32 weights,
            or the error is theirs.
        rollouts: of one optimizer step, at least two, with advantages, and ``ref_logprobs`` where the loss has a KL;
            of unequal lengths, several to a group.
        max_micro_batches: the finest cut, at least 2.
        temperature: sampling temperature.
        max_completion_tokens: for the ``"constant"`` aggregation; None: the longest completion here.
        tolerance: largest allowed |difference| / |gradient|, both over all parameters.

    Returns:
        The largest relative error found.

    Raises:
        AssertionError: an error above ``tolerance``, naming the cut.
        ValueError: fewer than two rollouts or micro-batches, no ``ref_logprobs`` for the loss's KL, or a gradient of
            zero: the check could not fail.
    """
    _check_arguments(module, rollouts, max_micro_batches)
    module.configure_model()
    live = sum(live_tokens([r]) > 0 for r in rollouts)
    longest = max_completion_tokens or max(len(r.completion_ids) for r in rollouts)
    denominator = module.denominator(live_tokens(rollouts), live, longest)
    forward, right, worst = module.policy_forward, torch.zeros(0), 0.0
    try:
        for name, way, share, parts in _cuts(module, rollouts, max_micro_batches):
            module.policy_forward = way
            found = _gradient(
                module, [pack(p, temperature=temperature, denominator=denominator, share_prefix=share) for p in parts]
            )
            right = right if len(right) else found
            if not bool(right.any()):
                raise ValueError("the gradient is zero: give rollouts advantages that are not all 0, and live tokens")
            error = float((found - right).norm() / right.norm())
            if not error <= tolerance:
                raise AssertionError(
                    f"{name}: the gradient is off by {error:.1e} of its size (tolerance {tolerance:.0e}). Does the "
                    "loss average over a micro-batch? It must add up terms over batch.denominator: self.aggregate does"
                )
            worst = max(worst, error)
    finally:
        module.policy_forward = forward
    return worst


def _check_arguments(module: RLModule, rollouts: list[Rollout], max_micro_batches: int) -> None:
    if len(rollouts) < 2:
        raise ValueError(f"gradient_cuts needs at least two rollouts to cut apart, got {len(rollouts)}")
    if max_micro_batches < 2:
        raise ValueError(f"max_micro_batches={max_micro_batches} cuts nothing: use at least 2")
    if module.kl_coef > 0 and not module.kl_in_reward and any(r.ref_logprobs is None for r in rollouts):
        raise ValueError(
            f"kl_coef={module.kl_coef} and rollouts without ref_logprobs: the KL would be left out of what is checked. "
            "Set them on every rollout (RLModule.score does)"
        )


def _cuts(
    module: RLModule, rollouts: list[Rollout], most: int
) -> Iterator[tuple[str, PolicyForward, bool, list[list[Rollout]]]]:
    """Yield each cut's name, forward, whether prefixes are shared, and parts; the one that is compared with first."""
    ways = [("padded", False, False)]
    if PolicyForward().packer(module.policy).share_prefix:  # takes packed rows
        ways += [("packed", True, False), ("packed with shared prefixes", True, True)]
    for name, packed, share in ways:
        forward = PolicyForward(packed, share)
        for count in range(1, most + 1):
            cut = f"{count} micro-batches, {name}"
            yield cut, forward, share, Packer(share).split(rollouts, count)
            dealt = [part for i in range(count) if (part := rollouts[i::count])]
            yield f"{cut}, dealt out", forward, share, dealt


def _gradient(module: RLModule, micros: list[MicroBatch]) -> Tensor:
    """Return the step's gradient, flat float64, leaving none behind."""
    trained = [p for p in module.policy.parameters() if p.requires_grad]
    kept = [p.grad for p in trained]
    for p in trained:
        p.grad = None
    for micro in micros:
        micro = micro.to(trained[0].device)
        module.full_loss(micro)[0].backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
    for p, grad in zip(trained, kept, strict=True):
        p.grad = grad
    return torch.cat([grad.flatten().double() for grad in grads])
