"""Advantages from rewards: one number for each rollout, from the rollouts it is compared with.

Every estimator takes ``rewards`` [R] and ``group_ids`` [R] (groups of any sizes, in any order) and returns float32 [R]
in the order of the input. What they share:

* A reward of NaN or None means that nobody scored the rollout: its advantage is 0 and no baseline counts it. Give it a
  zero ``loss_mask`` too, or it still counts in the loss's denominator.
* A group whose rewards are all the same gives exactly 0.0, and so does a group of one (see :func:`zero_spread`).
* Arithmetic is float64.
* ValueError if the lengths differ or a reward is infinite.

The two REINFORCE++ estimators look at the whole batch: give them the rewards of all ranks. Left out: reward shaping,
whitening by token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightrl.groups import Groups, Rewards, as_float64, has_spread


def group_mean(rewards: Rewards, group_ids: Tensor | Sequence[int]) -> Tensor:
    """``A_i = r_i - mean of its group`` (Dr. GRPO, arXiv 2503.20783).

    Args:
        rewards: [R], NaN or None where nobody scored.
        group_ids: int64 [R].

    Returns:
        float32 [R].

    Example:
        >>> group_mean([1.0, 0.0, 1.0, 0.0], [0, 0, 0, 0]).tolist()
        [0.5, -0.5, 0.5, -0.5]
    """
    groups = Groups.of(rewards, group_ids)
    return groups.finish(groups.rewards - groups.mean(groups.rewards))


dr_grpo = group_mean


def group_zscore(rewards: Rewards, group_ids: Tensor | Sequence[int]) -> Tensor:
    """``A_i = (r_i - mean) / std`` of its group, std unbiased (GRPO, arXiv 2402.03300).

    There is no epsilon: a group without spread is exactly 0, and any other gives at most (n - 1) / sqrt(n).

    Args:
        rewards: [R], NaN or None where nobody scored.
        group_ids: int64 [R].

    Returns:
        float32 [R].
    """
    groups = Groups.of(rewards, group_ids)
    return groups.finish((groups.rewards - groups.mean(groups.rewards)) / groups.std())


def leave_one_out(rewards: Rewards, group_ids: Tensor | Sequence[int], *, scale: bool = False) -> Tensor:
    """``A_i = r_i - mean of the others of its group`` (RLOO, arXiv 2402.14740).

    Args:
        rewards: [R], NaN or None where nobody scored.
        group_ids: int64 [R].
        scale: Divide by the whole group's unbiased std, so that no advantage is above sqrt(n). (The std of the others
            alone is 0 for the one odd rollout of a group.)

    Returns:
        float32 [R].
    """
    groups = Groups.of(rewards, group_ids)
    others = (groups.counts - 1).clamp(min=1)
    advantages = (groups.rewards - groups.mean(groups.rewards)) * groups.counts / others
    return groups.finish(advantages / groups.std() if scale else advantages)


def reinforce_plus_plus(rewards: Rewards, group_ids: Tensor | Sequence[int]) -> Tensor:
    """``A_i = (r_i - mean) / std`` of the whole batch, std unbiased (REINFORCE++, arXiv 2501.03262).

    Args:
        rewards: [R], NaN or None where nobody scored; of all ranks.
        group_ids: int64 [R]; the values do not matter, it is here to let estimators change places.

    Returns:
        float32 [R].
    """
    return group_zscore(rewards, torch.zeros_like(Groups.of(rewards, group_ids).index))


def reinforce_plus_plus_baseline(rewards: Rewards, group_ids: Tensor | Sequence[int]) -> Tensor:
    """``A_i = (r_i - mean of its group) / std of these over the whole batch`` (REINFORCE++-baseline, arXiv 2501.03262).

    Centred on groups, these have mean 0 over the batch already; the std is unbiased.

    Args:
        rewards: [R], NaN or None where nobody scored; of all ranks.
        group_ids: int64 [R].

    Returns:
        float32 [R].
    """
    groups = Groups.of(rewards, group_ids)
    centred = torch.where(groups.live & groups.spread, groups.rewards - groups.mean(groups.rewards), 0.0)
    variance = centred.square().sum() / (groups.live.sum() - 1).clamp(min=1)
    return groups.finish(centred / variance.sqrt())


def opo(rewards: Rewards, group_ids: Tensor | Sequence[int], lengths: Tensor | Sequence[int]) -> Tensor:
    """``A_i = r_i - sum(length r) / sum(length)`` over its group (OPO's optimal baseline, arXiv 2505.23585).

    Args:
        rewards: [R], NaN or None where nobody scored.
        group_ids: int64 [R].
        lengths: [R], completion tokens of each rollout, >= 1 where scored.

    Returns:
        float32 [R].

    Raises:
        ValueError: If the lengths differ, a reward is infinite or a scored rollout has no token.
    """
    groups = Groups.of(rewards, group_ids)
    weights = torch.as_tensor(lengths, dtype=torch.float64, device=groups.rewards.device)
    if weights.shape != groups.rewards.shape:
        raise ValueError(f"{groups.rewards.numel()} rewards need as many lengths, got {list(weights.shape)}.")
    if bool((groups.live & ~(weights >= 1)).any()):
        raise ValueError(f"lengths must be at least 1, got {weights[groups.live].min().item():g}.")
    weights = torch.where(groups.live, weights, 0.0)
    return groups.finish(groups.rewards - groups.sum(weights * groups.rewards) / groups.sum(weights))


def pass_at_k(rewards: Rewards, group_ids: Tensor | Sequence[int], k: int) -> Tensor:
    """``A_i = (E[best of k with i among them] - E[best of k]) / std[best of k]`` over the k-subsets of its group.

    With rewards 0 and 1, c of n wrong: E[best of k] = R = 1 - C(c, k) / C(n, k), its std sqrt(R (1 - R)), and with a
    wrong i among them 1 - C(c - 1, k - 1) / C(n - 1, k - 1) (Pass@k training, arXiv 2508.10751). Any other rewards: the
    same expectations of the maximum (as in PKPO, arXiv 2505.15201).

    Args:
        rewards: [R], NaN or None where nobody scored.
        group_ids: int64 [R].
        k: Attempts of which the best counts; ``k=1`` is the z-score with the biased std.

    Returns:
        float32 [R]; 0 where all k-subsets have the same best, or fewer than k rollouts were scored.

    Raises:
        ValueError: If k is below 1 or above the size of every group, the lengths differ or a reward is infinite.
    """
    groups = Groups.of(rewards, group_ids)
    largest = int(torch.bincount(groups.index).max()) if groups.index.numel() else k
    if not 1 <= k <= largest:
        raise ValueError(f"k={k} must be between 1 and the group size, {largest} at most here.")
    advantages = torch.zeros_like(groups.rewards)
    for group in range(int(groups.index.max()) + 1 if groups.index.numel() else 0):
        members = (groups.live & (groups.index == group)).nonzero().squeeze(-1)
        ordered, order = groups.rewards[members].sort()
        # The best of k is one of the top n - k + 1.
        if len(members) >= k and has_spread(ordered[k - 1], ordered[-1]):
            advantages[members[order]] = ordered.new_tensor(_best_of_k_advantages(ordered.tolist(), k))
    return groups.finish(advantages)


def compute_advantages(rewards: Tensor | Sequence[float | None], group_size: int, scale: bool = False) -> Tensor:
    """``A_i = r_i - mean of its group``, for groups of one size that follow each other.

    Args:
        rewards: [R] with R a multiple of group_size, or [P, group_size].
        group_size: Completions of each prompt.
        scale: Divide by the group's std, as :func:`group_zscore` does.

    Returns:
        float32, the shape of rewards.

    Raises:
        ValueError: If group_size does not divide the number of rewards, or a reward is infinite.

    Example:
        >>> compute_advantages([1.0, 0.0, 1.0, 0.0], group_size=4).tolist()
        [0.5, -0.5, 0.5, -0.5]
    """
    values = as_float64(rewards)
    if group_size < 1 or values.dim() == 0 or (values.numel() if values.dim() == 1 else values.shape[-1]) % group_size:
        raise ValueError(f"group_size={group_size} does not divide rewards of shape {list(values.shape)} into groups.")
    group_ids = torch.arange(values.numel(), device=values.device) // group_size
    return (group_zscore if scale else group_mean)(values.flatten(), group_ids).reshape(values.shape)


def gae(
    rewards: Tensor,
    values: Tensor,
    sequence_ids: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    loss_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation by token (PPO; arXiv 1506.02438).

    ``delta_t = r_t + gamma V_{t+1} - V_t`` and ``A_t = delta_t + gamma lam A_{t+1}``, V and A being 0 after a
    sequence's last token, whether a stop token or the budget ended it. Masked tokens (observations, say) are stepped
    over as if they were not there.

    Args:
        rewards: [N], by token (often 0 but for the last).
        values: [N], the critic's estimate before each token.
        sequence_ids: int64 [N], each sequence's tokens side by side.
        gamma: Discount, 0..1.
        lam: Trade-off of bias (0) and variance (1).
        loss_mask: bool [N], or None for all live.

    Returns:
        Advantages and returns (advantages + values), both float32 [N], detached, 0 in masked slots.

    Raises:
        ValueError: If shapes differ, or gamma or lam is outside 0..1.
    """
    if not (0 <= gamma <= 1 and 0 <= lam <= 1):
        raise ValueError(f"gamma={gamma} and lam={lam} must be between 0 and 1.")
    if not rewards.shape == values.shape == sequence_ids.shape or rewards.dim() != 1:
        raise ValueError(
            f"rewards {list(rewards.shape)}, values {list(values.shape)}, ids {list(sequence_ids.shape)} must be [N]."
        )
    live = torch.ones_like(sequence_ids, dtype=torch.bool) if loss_mask is None else loss_mask.bool()
    value, ids = values.detach()[live].double(), sequence_ids[live]
    advantage = rewards.detach()[live].double() - value
    advantage[:-1] += torch.where(ids[1:] == ids[:-1], gamma * value[1:], 0.0)
    # After each round an entry holds the discounted sum of the next 2, 4, 8, .. deltas of its sequence.
    distance = 1
    while distance < len(ids):
        ahead = (gamma * lam) ** distance * advantage[distance:]
        advantage[:-distance] += torch.where(ids[distance:] == ids[:-distance], ahead, 0.0)
        distance *= 2
    advantages, returns = values.new_zeros((2, len(values)), dtype=torch.float32)
    advantages[live], returns[live] = advantage.float(), (advantage + value).float()
    return advantages, returns


def zero_spread(rewards: Rewards, group_ids: Tensor | Sequence[int]) -> Tensor:
    """Tell which rollouts are in a group whose scored rewards are all the same (or are fewer than two).

    Args:
        rewards: [R], NaN or None where nobody scored.
        group_ids: int64 [R].

    Returns:
        bool [R].
    """
    return ~Groups.of(rewards, group_ids).spread


def _best_of_k_advantages(r: list[float], k: int) -> list[float]:
    """:func:`pass_at_k` for one group with spread, its rewards ascending.

    Of the subsets, C(j, k - 1) have the j-th smallest as best. Of those with i in them, C(i, k - 1) have i as best and,
    for each j > i, C(j - 1, k - 2) have j.
    """
    n = len(r)
    weights = [math.comb(j, k - 1) / math.comb(n, k) for j in range(n)]
    mean = math.fsum(w * x for w, x in zip(weights, r, strict=True))
    std = math.sqrt(math.fsum(w * (x - mean) ** 2 for w, x in zip(weights, r, strict=True)))
    advantages, above = [0.0] * n, 0.0
    for i in reversed(range(n)):
        best = above + math.comb(i, k - 1) / math.comb(n - 1, k - 1) * r[i]
        advantages[i] = (best - mean) / std
        if k > 1 and i > 0:
            above += math.comb(i - 1, k - 2) / math.comb(n - 1, k - 1) * r[i]
    return advantages
