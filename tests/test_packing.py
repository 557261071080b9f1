"""Rollouts to micro-batches: what lies where, and that no budget is broken and nothing is lost."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightrl.algorithms import GSPO
from lightrl.balance import Packer
from lightrl.corrections import GeometricMean, TruncatedSequence
from lightrl.packing import idle_rollout, live_tokens, pack, shuffled_parts
from lightrl.rollout_state import rollouts_from_state, rollouts_to_state
from lightrl.types import Prompt, Rollout, RolloutBatch, RolloutGroup
from tests.helpers.tiny import random_rollouts


def rollout(prompt: list[int], completion: list[int], **args: Any) -> Rollout:
    return Rollout(prompt, completion, torch.arange(len(completion)) / 10, **args)


def size(r: Rollout) -> int:
    return len(r.token_ids)


def sized(sizes: list[int]) -> list[Rollout]:
    return [rollout([i], [i] * (n - 1)) for i, n in enumerate(sizes)]


def test_worked_example() -> None:
    first = rollout([5, 6], [7, 2], advantage=0.5, policy_versions=torch.tensor([3, 4]))
    second = rollout([8], [9], advantage=torch.tensor([-1.0]), loss_mask=torch.tensor([False]))
    micro = pack([first, second], temperature=0.7, denominator=3.0)
    assert micro.lengths == [4, 2]
    assert micro.input_ids.tolist() == [5, 6, 7, 2, 8, 9]
    assert micro.position_ids.tolist() == [0, 1, 2, 3, 0, 1]
    assert micro.targets.tolist() == [7, 2, 9]
    assert micro.logit_index.tolist() == [1, 2, 4]
    assert micro.sequence_ids.tolist() == [0, 0, 1]
    assert micro.loss_mask.tolist() == [True, True, False]
    assert micro.advantages.tolist() == [0.5, 0.5, -1.0]
    assert micro.rollout_logprobs.tolist() == pytest.approx([0.0, 0.1, 0.0])
    assert micro.policy_versions.tolist() == [3, 4, 0]
    assert micro.old_logprobs is None
    assert micro.ref_logprobs is None
    assert (micro.temperature, micro.denominator) == (0.7, 3.0)


def test_old_and_reference_logprobs_are_there_once_every_rollout_has_them() -> None:
    scored = rollout([5], [7, 2], scored_logprobs=torch.tensor([-1.0, -2.0]), ref_logprobs=torch.tensor([-3.0, -4.0]))
    both = pack([scored, idle_rollout()], temperature=1.0)
    assert both.old_logprobs is not None
    assert both.ref_logprobs is not None
    assert both.old_logprobs.tolist() == [-1.0, -2.0, 0.0]
    assert both.ref_logprobs.tolist() == [-3.0, -4.0, 0.0]
    mixed = pack([scored, rollout([5], [7])], temperature=1.0)
    assert mixed.old_logprobs is None
    assert mixed.ref_logprobs is None


def test_b16_masks_come_from_lengths_when_pad_is_eos() -> None:
    eos = 2  # and pad
    rollouts = [rollout([eos, 5, eos], [5, 6, eos]), rollout([eos], [eos]), rollout([4], [7, 8, 9, 4])]
    micro = pack(rollouts, temperature=1.0)
    assert micro.lengths == [6, 2, 5]
    assert micro.loss_mask.tolist() == [True] * 8
    assert micro.targets.tolist() == [5, 6, eos, eos, 7, 8, 9, 4]
    assert live_tokens([rollout([eos], [eos])]) == 1


@pytest.mark.parametrize(("prompt", "completion"), [([], [1]), ([1], [])])
def test_an_empty_prompt_or_completion_is_an_error(prompt: list[int], completion: list[int]) -> None:
    with pytest.raises(ValueError, match=f"{len(prompt)} prompt and {len(completion)} completion tokens"):
        pack([rollout(prompt, completion)], temperature=1.0)


def test_live_tokens_counts_unmasked_completion_tokens() -> None:
    masked = rollout([1, 1, 1], [4, 5, 6], loss_mask=torch.tensor([True, False, True]))
    assert live_tokens([masked, rollout([1], [2]), idle_rollout()]) == 3


def test_an_idle_rollout_is_two_tokens_that_count_for_nothing() -> None:
    micro = pack([idle_rollout()], temperature=1.0)
    assert len(micro.input_ids) == 2
    assert not micro.loss_mask.any()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(2, 12), max_size=20), st.integers(12, 40))
def test_the_budget_holds_and_every_rollout_is_in_one_part(sizes: list[int], budget: int) -> None:
    rollouts = sized(sizes)
    parts = Packer().plan(rollouts, budget)
    assert all(0 < sum(map(size, p)) <= budget for p in parts)
    found = sorted(id(r) for p in parts for r in p if live_tokens([r]))
    assert found == sorted(map(id, rollouts))


def test_bins_are_few_and_balanced() -> None:
    plan = Packer().plan
    assert len(plan([], 10)) == 1
    assert len(plan(sized([5, 5]), 10)) == 1
    assert len(plan(sized([6, 5]), 10)) == 2
    assert len(plan(sized([6, 6, 6]), 10)) == 3  # 18 tokens would be two bins, if rollouts could be cut
    assert sorted(sum(map(size, p)) for p in Packer().split(sized([9, 2, 3, 6, 4]), 2)) == [12, 12]


def test_more_bins_than_rollouts_are_filled_with_idle_ones() -> None:
    parts = Packer().split(sized([4]), 3)
    assert [live_tokens(p) for p in parts] == [3, 0, 0]
    assert Packer().split([], 1)[0][0].loss_mask is not None


def test_a_rank_with_little_makes_as_many_micro_batches_as_the_neediest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightrl.balance.all_objects", lambda mine: [mine, 4])
    assert [live_tokens(p) for p in Packer().plan(sized([3]), 100)] == [2, 0, 0, 0]


def test_mini_batches_are_a_shuffled_partition_of_like_sizes() -> None:
    rollouts = random_rollouts(11)
    parts = shuffled_parts(rollouts, 3, seed=5)
    assert [len(p) for p in parts] == [4, 4, 3]
    assert sorted(id(r) for p in parts for r in p) == sorted(map(id, rollouts))
    assert shuffled_parts(rollouts, 3, seed=5) == parts
    assert shuffled_parts(rollouts, 3, seed=6) != parts


def test_to_moves_every_tensor_and_nothing_else() -> None:
    micro = pack(random_rollouts(2), temperature=0.5, denominator=7.0).to("meta")
    tensors = [v for f in type(micro).__dataclass_fields__ if isinstance(v := getattr(micro, f), torch.Tensor)]
    assert len(tensors) == 9
    assert all(t.is_meta for t in tensors)
    assert (micro.temperature, micro.denominator, len(micro.lengths)) == (0.5, 7.0, 2)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_a_temperature_that_has_no_logprobs_is_named(temperature: float) -> None:
    with pytest.raises(ValueError, match=f"temperature={temperature} must be above 0"):
        pack(random_rollouts(2), temperature=temperature)


def test_nothing_to_pack_is_named() -> None:
    with pytest.raises(ValueError, match=r"pack\(\[\]\): .*idle_rollout"):
        pack([], temperature=1.0)


@pytest.mark.parametrize(
    "name", ["rollout_logprobs", "loss_mask", "scored_logprobs", "ref_logprobs", "advantage", "policy_versions"]
)
@pytest.mark.parametrize("off", [[1, -1], [0, 1], [0, -1]])
def test_one_entry_for_each_completion_token(name: str, off: list[int]) -> None:
    """One too many in one rollout and one too few in the next would go unnoticed, shifted against each other."""
    rollouts = [rollout([5, 6], [7, 8, 9]), rollout([5], [3, 4])]
    good = [torch.ones(len(r.completion_ids), dtype=torch.bool) for r in rollouts]
    for r, values in zip(rollouts, good, strict=True):
        setattr(r, name, values)
    assert len(pack(rollouts, temperature=1.0).targets) == 5
    for r, d in zip(rollouts, off, strict=True):
        setattr(r, name, torch.ones(len(r.completion_ids) + d, dtype=torch.bool))
    wrong = 0 if off[0] else 1
    found, right = (len(x) for x in (getattr(rollouts[wrong], name), rollouts[wrong].completion_ids))
    message = rf"{name} of a rollout has shape \[{found}\], but its completion has {right} tokens: .*\[{right}\]"
    with pytest.raises(ValueError, match=message):
        pack(rollouts, temperature=1.0)


def test_an_advantage_is_a_number_or_one_for_each_token() -> None:
    for advantage in (2.0, torch.tensor(2.0), torch.full((3,), 2.0)):
        assert pack([rollout([5], [7, 8, 9], advantage=advantage)], temperature=1.0).advantages.tolist() == [2.0] * 3
    for wrong in (torch.ones(1), torch.ones(3, 1)):
        with pytest.raises(ValueError, match=r"advantage of a rollout has shape .* or a single number"):
            pack([rollout([5], [7, 8, 9], advantage=wrong)], temperature=1.0)


@pytest.mark.parametrize("share", [True, False])
def test_sequences_are_counted_without_asking_the_device(share: bool) -> None:
    """Tensors on "meta" have no values to look at: a GPU would be waited for just there."""
    micro = pack(random_rollouts(7, members=3), temperature=1.0, share_prefix=share)
    assert micro.by_sequence()["num_sequences"] == len(micro.sequences()) == 7
    micro.old_logprobs = micro.rollout_logprobs
    there = micro.to("meta")
    logprobs = there.rollout_logprobs
    gspo = GSPO("no/such/model")
    assert gspo.aggregate(gspo.policy_terms(there, logprobs, logprobs)[0], there).is_meta
    for correction in (TruncatedSequence(), GeometricMean()):
        assert correction(there, logprobs)[0].is_meta


def test_a_batch_in_a_checkpoint_keeps_all_but_what_rewards_have_seen() -> None:
    groups = [RolloutGroup(Prompt([5, 6], index=3), random_rollouts(2))]
    batch = RolloutBatch(groups, policy_version=4, temperature=0.7, max_completion_tokens=99)
    state = rollouts_to_state(batch)
    again = rollouts_from_state(state)
    assert again is not None
    assert (again.policy_version, again.temperature, again.max_completion_tokens) == (4, 0.7, 99)
    assert [r.completion_ids for r in again] == [r.completion_ids for r in batch]
    assert state is not None
    del state["max_completion_tokens"]  # as an older version wrote it
    older = rollouts_from_state(state)
    assert older is not None
    assert older.max_completion_tokens == 0
