"""A prefix that passes through the model once, against every sequence by itself."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightrl import RLModule
from lightrl.attention import packed_attention
from lightrl.layout import SequenceLayout
from lightrl.packing import pack
from lightrl.policy import PolicyForward
from lightrl.prefix import by_group, common_prefix
from lightrl.types import Prompt, Rollout, RolloutBatch, RolloutGroup
from tests.helpers.tiny import by_hand, random_rollouts, tiny_model
from tests.test_policy import ARCHITECTURES, build, gradients, one_at_a_time


def rollout(prompt: list[int], completion: list[int], group_id: int = 0, **args: Any) -> Rollout:
    return Rollout(prompt, completion, torch.zeros(len(completion)), group_id=group_id, **args)


def mixed_groups() -> list[Rollout]:
    """Ragged: a long prompt, a multi-turn group, one that agrees beyond its prompt, one alone; members interleaved."""
    long = [7, 3, 3, 9, 12, 30, 4, 18, 22, 5, 6]
    turns = [5, 9, 17, 4]
    return [
        rollout(long, [23, 31, 7, 2], 1),
        rollout([8, 8], [6, 11], 4),
        rollout(long, [9], 1),
        rollout([*turns, 21, 6], [4, 4], 2),
        rollout(long, [14, 3, 3, 3, 8, 2, 20, 11], 1),
        rollout([*turns, 30], [15, 2, 9], 2),
        rollout([9], [11, 12, 13, 14], 3),
        rollout([9], [11, 12, 13], 3),
        rollout([9], [11, 12, 20, 21, 22], 3),
    ]


def test_common_prefix_leaves_a_token_to_each() -> None:
    assert common_prefix([[5, 6, 7], [5, 6, 8, 9]]) == 2
    assert common_prefix([[5, 6], [5, 6, 8]]) == 1
    assert common_prefix([[5, 6], [5, 6]]) == 1
    assert common_prefix([[5, 6, 7]]) == 0
    assert common_prefix([[4, 6], [5, 6]]) == 0
    assert common_prefix([[1, 2, 3, 4], [1, 2, 9, 4], [1, 2, 3, 5]]) == 2


def test_groups_are_by_id_and_by_what_they_begin_with() -> None:
    rollouts = [rollout([5, 6], [7]), rollout([4], [4], 1), rollout([5, 6], [8, 9]), rollout([3], [4], 1)]
    assert by_group(rollouts) == [([0, 2], 2), ([1], 0), ([3], 0)]
    assert by_group([rollout([5, 6], [7], 0), rollout([5, 6], [7], 1)]) == [([0], 0), ([1], 0)]
    assert by_group([]) == []


def test_worked_example() -> None:
    micro = pack([rollout([5, 6], [7, 2]), rollout([5, 6], [9])], temperature=1.0, share_prefix=True)
    assert micro.input_ids.tolist() == [5, 6, 7, 2, 9]
    assert micro.lengths == [2, 2, 1]
    assert micro.prefixes == [-1, 0, 0]
    assert micro.position_ids.tolist() == [0, 1, 2, 3, 2]
    assert micro.logit_index.tolist() == [1, 2, 1]
    assert micro.targets.tolist() == [7, 2, 9]
    assert micro.sequence_ids.tolist() == [0, 0, 1]
    assert micro.num_tokens == 7
    assert [[(s.start, s.stop) for s in spans] for spans in micro.sequences()] == [[(0, 2), (2, 4)], [(0, 2), (4, 5)]]


def test_tokens_that_agree_beyond_the_prompt_are_shared_and_predicted_from_the_shared_part() -> None:
    micro = pack([rollout([9], [11, 12, 13]), rollout([9], [11, 12, 20])], temperature=1.0, share_prefix=True)
    assert micro.input_ids.tolist() == [9, 11, 12, 13, 20]
    assert micro.logit_index.tolist() == [0, 1, 2, 0, 1, 2]
    assert micro.targets.tolist() == [11, 12, 13, 11, 12, 20]


def test_only_the_row_differs_from_the_row_that_shares_nothing() -> None:
    rollouts = mixed_groups()
    shared, plain = (pack(rollouts, temperature=0.7, denominator=3.0, share_prefix=s) for s in (True, False))
    assert len(shared.input_ids) == 81 - 2 * 11 - 4 - 2 * 3  # prefixes of 11, 4, 3 lie once, not 3, 2, 3 times
    assert shared.num_tokens == plain.num_tokens == len(plain.input_ids)
    for name in ("targets", "sequence_ids", "loss_mask", "advantages", "rollout_logprobs", "policy_versions"):
        assert torch.equal(getattr(shared, name), getattr(plain, name)), name
    assert torch.equal(shared.input_ids[shared.logit_index], plain.input_ids[plain.logit_index])
    assert torch.equal(shared.position_ids[shared.logit_index], plain.position_ids[plain.logit_index])
    ids = [[t for s in spans for t in shared.input_ids[s].tolist()] for spans in shared.sequences()]
    assert ids == [r.token_ids.tolist() for r in rollouts]


@pytest.mark.parametrize("name", [n for n, (_, _, packed, _) in ARCHITECTURES.items() if packed])
def test_shared_equals_one_sequence_at_a_time(name: str) -> None:
    model, rollouts = build(name), mixed_groups()
    right = one_at_a_time(model, rollouts, 0.8)
    grads = gradients(model, right)
    micro = pack(rollouts, temperature=0.8, share_prefix=True)
    logprobs, entropy = PolicyForward()(model, micro)
    assert (logprobs - right).abs().max() < 1e-5
    for n, grad in gradients(model, logprobs).items():
        assert (grad - grads[n]).abs().max() < 1e-5 * max(1.0, float(grads[n].abs().max())), n
    unshared = PolicyForward()(model, pack(rollouts, temperature=0.8))[1]
    assert (entropy - unshared).abs().max() < 1e-5


LAYER = torch.nn.Identity()
PIECES = [6, 3, 20, 9, 1, 4, 2, 40]
PREFIXES = [-1, 0, 0, -1, 3, 0, 3, -1]


def spread(x: Tensor) -> tuple[Tensor, list[int], list[int]]:
    """Sequences written out from pieces: tokens [1, heads, T', D], sequence lengths, and where each piece's are."""
    start = [sum(PIECES[:i]) for i in range(len(PIECES))]
    index: list[int] = []
    lengths, own = [], []
    for i, p in enumerate(PREFIXES):
        before = list(range(start[p], start[p] + PIECES[p])) if p >= 0 else []
        index += before
        own += range(len(index), len(index) + PIECES[i])
        index += range(start[i], start[i] + PIECES[i])
        lengths.append(len(before) + PIECES[i])
    return x[:, :, index], lengths, own


@pytest.mark.parametrize("window", [None, 1, 4, 15, 100])
def test_pieces_look_at_their_prefix_and_themselves(window: int | None) -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, sum(PIECES), 8, generator=g, dtype=torch.float64).requires_grad_() for h in (4, 2, 2))
    found, _ = packed_attention(
        LAYER, q, k, v, None, layout=SequenceLayout(PIECES, prefixes=PREFIXES), sliding_window=window
    )
    (wide_q, lengths, own), (wide_k, *_), (wide_v, *_) = spread(q), spread(k), spread(v)
    wide, _ = packed_attention(
        LAYER, wide_q, wide_k, wide_v, None, layout=SequenceLayout(lengths), sliding_window=window
    )
    right = wide[:, own]
    torch.testing.assert_close(found, right)
    weight = torch.randn(right.shape, generator=g, dtype=torch.float64)
    a, b = (torch.autograd.grad((x * weight).sum(), [q, k, v]) for x in (found, right))
    torch.testing.assert_close(a, b)


def test_keys_for_the_kernel_are_each_pieces_prefix_and_itself() -> None:
    index, cumulative, longest = SequenceLayout([2, 1, 3, 2], prefixes=[-1, 0, 0, -1]).keys
    assert index is not None
    assert index.tolist() == [0, 1, 0, 1, 2, 0, 1, 3, 4, 5, 6, 7]
    assert cumulative.tolist() == [0, 2, 5, 10, 12]
    assert cumulative.dtype == torch.int32
    assert longest == 5
    plain = SequenceLayout([2, 1])
    assert plain.keys == (None, plain.cu_seqlens, 2)


def test_padded_rows_refuse_shared_prefixes_and_their_packer_makes_none() -> None:
    model, rollouts = tiny_model(), mixed_groups()
    with pytest.raises(ValueError, match="padded rows cannot share a prefix"):
        PolicyForward(packed=False)(model, pack(rollouts, temperature=1.0, share_prefix=True))
    assert not PolicyForward(packed=False).packer(model).share_prefix
    assert not PolicyForward(share_prefix=False).packer(model).share_prefix
    assert not PolicyForward().packer(build("Gemma2")).share_prefix
    packer = PolicyForward().packer(model)
    assert (packer.share_prefix, packer.hidden_size) == (True, 128)


@pytest.mark.parametrize("max_tokens", [12, 1000])
def test_old_and_reference_logprobs_are_scored_with_sharing(max_tokens: int) -> None:
    module = RLModule(tiny_model(), kl_coef=0.1)
    module.configure_model()
    rollouts = random_rollouts(6, members=3)
    groups = [RolloutGroup(Prompt(g[0].prompt_ids), g) for g in (rollouts[:3], rollouts[3:])]
    with torch.no_grad():
        for p in module.policy.parameters():
            p += 0.01 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0))
    module.score(RolloutBatch(groups), max_tokens=max_tokens, reused=True)
    for r in rollouts:
        old = by_hand(module.policy, r.prompt_ids, r.completion_ids)
        ref = by_hand(module.reference, r.prompt_ids, r.completion_ids)
        assert (old - ref).abs().max() > 1e-3
        torch.testing.assert_close(r.scored_logprobs, old, atol=1e-5, rtol=0)
        torch.testing.assert_close(r.ref_logprobs, ref, atol=1e-5, rtol=0)
