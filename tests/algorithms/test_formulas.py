"""Each algorithm's loss and gradient on a small batch against its paper's formula in float64, rollout by rollout."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import lightrl
from lightrl import algorithms
from lightrl.packing import pack
from lightrl.types import Prompt, Rollout, RolloutBatch, RolloutGroup
from tests.helpers.tiny import tiny_model, tiny_prompts
from tests.helpers.training import quiet_trainer, tiny_data

REWARDS = [[1.0, 0.0, 0.5], [0.0, 1.0], [1.0, 1.0]]
LENGTHS = [[3, 1, 4], [2, 5], [2, 2]]
LONGEST = 10
Rows = list[Tensor]


def scored_batch() -> RolloutBatch:
    """Two rollouts as on-policy as GSPO's narrow clip wants them, the others with ratios well outside most clips."""
    g = torch.Generator().manual_seed(0)
    groups = []
    for group_id, (rewards, lengths) in enumerate(zip(REWARDS, LENGTHS, strict=True)):
        rollouts = []
        for i, (reward, n) in enumerate(zip(rewards, lengths, strict=True)):
            now = -3 * torch.rand(n, generator=g) - 0.1
            noise = 0.0 if i == 0 else 0.4 * torch.randn(n, generator=g)
            r = Rollout([3], [4] * n, now, reward=reward, group_id=group_id, scored_logprobs=now + noise)
            r.ref_logprobs = now + 0.5 * torch.randn(n, generator=g)
            rollouts.append(r)
        groups.append(RolloutGroup(Prompt([3]), rollouts))
    return RolloutBatch(groups, max_completion_tokens=LONGEST)


def centred(rewards: list[float]) -> list[float]:
    return [r - math.fsum(rewards) / len(rewards) for r in rewards]


def whitened(rewards: list[float]) -> list[float]:
    centre = centred(rewards)
    std = math.sqrt(math.fsum(c * c for c in centre) / (len(rewards) - 1))
    return [c / std if std else 0.0 for c in centre]


def by_group(estimate: Callable[[list[float]], list[float]]) -> list[float]:
    return [a for rewards in REWARDS for a in estimate(rewards)]


def length_weighted() -> list[float]:
    found = []
    for rewards, lengths in zip(REWARDS, LENGTHS, strict=True):
        baseline = sum(n * r for n, r in zip(lengths, rewards, strict=True)) / sum(lengths)
        found += [r - baseline for r in rewards]
    return found


def clipped(ratio: Tensor, a: float, low: float = 0.2, high: float = 0.2) -> Tensor:
    return -torch.minimum(ratio * a, ratio.clamp(1 - low, 1 + high) * a)


def ppo(advantages: list[float], how: str, high: float = 0.2) -> Callable[[Rows, Rows, Rows], Tensor]:
    def loss(now: Rows, old: Rows, ref: Rows) -> Tensor:
        terms = [clipped((x - o).exp(), a, high=high) for x, o, a in zip(now, old, advantages, strict=True)]
        return together(terms, how)

    return loss


def together(terms: list[Tensor], how: str) -> Tensor:
    if how == "sequence":
        return torch.stack([t.mean() for t in terms]).mean()
    return torch.cat(terms).sum() / (len(terms) * LONGEST if how == "constant" else sum(map(len, terms)))


def grpo(now: Rows, old: Rows, ref: Rows) -> Tensor:
    """With the k3 penalty weighted by the ratio: its exact gradient is the reverse KL's."""
    kls = [(x - o).exp() * ((r - x).exp() - (r - x) - 1) for x, o, r in zip(now, old, ref, strict=True)]
    return ppo(by_group(whitened), "sequence")(now, old, ref) + 0.04 * together(kls, "sequence")


def gspo(now: Rows, old: Rows, ref: Rows) -> Tensor:
    rows = zip(now, old, by_group(whitened), strict=True)
    return torch.stack([clipped((x - o).mean().exp(), a, 3e-4, 4e-4) for x, o, a in rows]).mean()


def cispo(now: Rows, old: Rows, ref: Rows) -> Tensor:
    rows = zip(now, old, by_group(whitened), strict=True)
    return together([-(x - o).exp().clamp(max=5).detach() * a * x for x, o, a in rows], "token")


def others(rewards: list[float]) -> list[float]:
    return [r - (sum(rewards) - r) / (len(rewards) - 1) for r in rewards]


def dapo() -> list[float]:
    """Buffer 2 of 4 allowed tokens: lengths 3 and 4 lose 1/2 and 1, and longer ones no more than 1."""
    found = []
    for rewards, lengths in zip(REWARDS, LENGTHS, strict=True):
        found += whitened([r - {3: 0.5, 4: 1.0, 5: 1.0}.get(n, 0.0) for r, n in zip(rewards, lengths, strict=True)])
    return found


EVERYTHING = [r for rewards in REWARDS for r in rewards]
CENTRED = by_group(centred)
BATCH_STD = math.sqrt(sum(c * c for c in CENTRED) / (len(CENTRED) - 1))
CASES: dict[str, tuple[str, dict[str, Any], Any]] = {
    "GRPO": ("GRPO", {}, grpo),
    "DrGRPO": ("DrGRPO", {}, ppo(CENTRED, "constant")),
    "DAPO": ("DAPO", {"overlong_buffer": 0}, ppo(by_group(whitened), "token", high=0.28)),
    "DAPO, over-long": ("DAPO", {"overlong_buffer": 2}, ppo(dapo(), "token", high=0.28)),
    "RLOO": ("RLOO", {}, ppo(by_group(others), "constant")),
    "REINFORCE++": ("REINFORCEPlusPlus", {}, ppo(whitened(EVERYTHING), "token")),
    "REINFORCE++-baseline": (
        "REINFORCEPlusPlus",
        {"baseline": True},
        ppo([c / BATCH_STD for c in CENTRED], "token"),
    ),
    "GSPO": ("GSPO", {}, gspo),
    "CISPO": ("CISPO", {}, cispo),
    "OPO": ("OPO", {}, ppo(length_weighted(), "token")),
}


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_the_formulas(case: str) -> None:
    name, arguments, formula = CASES[case]
    module, batch = getattr(lightrl.algorithms, name)(tiny_model(), **arguments), scored_batch()
    batch.max_completion_tokens = 4 if arguments.get("overlong_buffer") else LONGEST
    module.advantages(batch)
    rollouts = batch.rollouts
    denominator = module.denominator(sum(len(r.completion_ids) for r in rollouts), len(rollouts), LONGEST)
    micro = pack(rollouts, temperature=1.0, denominator=denominator)
    logprobs = micro.rollout_logprobs.clone().requires_grad_()
    loss, metrics = module.loss(micro, logprobs)
    loss.backward()

    rows = [r.rollout_logprobs.double().requires_grad_() for r in rollouts]
    old, ref = ([getattr(r, n).double() for r in rollouts] for n in ("scored_logprobs", "ref_logprobs"))
    right = formula(rows, old, ref)
    right.backward()
    assert float(loss.detach()) == pytest.approx(float(right.detach()), rel=1e-5, abs=1e-7)
    gradient = torch.cat([x.grad for x in rows])
    assert gradient.abs().max() > 1e-3
    assert logprobs.grad is not None
    assert (logprobs.grad - gradient).abs().max() < 1e-6
    assert 0 <= float(metrics["train/clip_frac"].nanmean()) < 1


def test_no_two_algorithms_are_the_same() -> None:
    rows = [r.rollout_logprobs.double() for r in scored_batch()]
    old, ref = ([getattr(r, n).double() for r in scored_batch()] for n in ("scored_logprobs", "ref_logprobs"))
    found = sorted(float(formula(rows, old, ref)) for _, _, formula in CASES.values())
    assert all(b - a > 1e-6 for a, b in zip(found, found[1:], strict=False))


def test_whitening_is_over_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank has group ids of its own that are equal to ours."""
    from lightrl.algorithms import reinforce_plus_plus as file

    ranks = [([1.0, 0.0], [0, 0]), ([0.0, 0.0, 1.0], [0, 0, 0])]
    gathered = [(torch.tensor(r, dtype=torch.float64), torch.tensor(g)) for r, g in ranks]
    monkeypatch.setattr(file, "all_objects", lambda value: gathered)
    whole = whitened([1.0, 0.0, 0.0, 0.0, 1.0])
    grouped = centred([1.0, 0.0]) + centred([0.0, 0.0, 1.0])
    std = math.sqrt(sum(c * c for c in grouped) / 4)
    for baseline, right in ((False, whole), (True, [c / std for c in grouped])):
        module = algorithms.REINFORCEPlusPlus(tiny_model(), baseline=baseline)
        for rank, part in enumerate((right[:2], right[2:])):
            monkeypatch.setattr(file, "rank", lambda rank=rank: rank)
            found = module.estimate(*gathered[rank], RolloutBatch([]))
            assert found.tolist() == pytest.approx(part, rel=1e-6)


def test_the_kl_in_the_reward() -> None:
    batch = scored_batch()
    module = algorithms.RLOO(tiny_model(), kl_coef=0.5)
    right = [r.reward - 0.5 * float((r.scored_logprobs - r.ref_logprobs).double().sum()) for r in batch]
    assert module.rewards(batch).tolist() == pytest.approx(right, rel=1e-5)
    micro = pack(batch.rollouts, temperature=1.0)
    with_kl = module.loss(micro, micro.rollout_logprobs)[0]
    assert float(with_kl) == float(algorithms.RLOO(tiny_model()).loss(micro, micro.rollout_logprobs)[0])


@pytest.mark.parametrize("name", algorithms.__all__)
def test_saved_arguments_make_the_same_module(name: str) -> None:
    made = getattr(algorithms, name)("no/such/model", lr=0.25, mask_truncated=True)
    again = type(made)(**made.hparams)
    for attribute, value in vars(made).items():
        if isinstance(value, (bool, int, float, str, tuple)) and not attribute.startswith("_"):
            assert getattr(again, attribute) == value, attribute
    assert again.lr == 0.25
    assert again.mask_truncated


@pytest.mark.parametrize("name", algorithms.__all__)
@pytest.mark.parametrize(
    "wrong",
    [{"clip_ratio_low": -0.1}, {"clip_ratio_high": -0.1}, {"aggregation": "mean"}, {"entropy_coef": -1.0}],
    ids=str,
)
def test_bad_arguments_are_named(name: str, wrong: dict[str, Any]) -> None:
    ((argument, value),) = wrong.items()
    with pytest.raises(ValueError, match=re.escape(f"{argument}={value!r}")):
        getattr(algorithms, name)("no/such/model", **wrong)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("DAPO", {"max_sampling_rounds": 0}),
        ("DAPO", {"overlong_buffer": -1}),
        ("OPO", {"scale_rewards": True}),
        ("REINFORCEPlusPlus", {"scale_rewards": False}),
        ("CISPO", {"clip_ratio_low": 1.5}),
    ],
    ids=str,
)
def test_bad_arguments_of_one_algorithm_are_named(name: str, wrong: dict[str, Any]) -> None:
    ((argument, value),) = wrong.items()
    with pytest.raises(ValueError, match=re.escape(f"{argument}={value}")):
        getattr(algorithms, name)("no/such/model", **wrong)


@pytest.mark.parametrize("name", algorithms.__all__)
def test_b05_a_group_of_one_is_refused_where_the_group_is_the_baseline(name: str) -> None:
    module, data = getattr(algorithms, name)(tiny_model(), lr=1e-3), tiny_data(tiny_prompts(8), group_size=1)
    trainer = quiet_trainer(max_steps=1)
    if name in ("REINFORCEPlusPlus", "PPO"):
        trainer.fit(module, data)
        assert trainer.global_step == 1
        return
    with pytest.raises(ValueError, match=f"group_size=1: {name} compares"):
        trainer.fit(module, data)


@pytest.mark.parametrize("name", sorted(set(algorithms.__all__) - {"PPO"}))
def test_b05_a_group_that_shrank_to_one_has_advantage_0(name: str) -> None:
    module = getattr(algorithms, name)(tiny_model(), **({"baseline": True} if name.startswith("REIN") else {}))
    rollouts = [Rollout([3], [4], torch.zeros(1), reward=r, group_id=g) for r, g in ((1.0, 0), (0.0, 0), (0.7, 1))]
    module.advantages(RolloutBatch([RolloutGroup(Prompt([3]), rollouts)]))
    found = [r.advantage for r in rollouts]
    assert found[2] == 0.0
    assert found[0] == -found[1] > 0
