"""What vLLM returned as rollouts: groups, rewards, logprobs; and advantages of them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightrl import RolloutBatch, clipped_policy_loss, compute_advantages, get_logprobs, parse_vllm_outputs
from tests.helpers.tiny import by_hand, tiny_model


def sample(ids: list[int], text: str = "", reason: str = "stop", logprobs: bool = True) -> Any:
    rows = [{i: SimpleNamespace(logprob=-0.5 * i), 99: SimpleNamespace(logprob=-0.1)} for i in ids]
    return SimpleNamespace(token_ids=ids, text=text, finish_reason=reason, logprobs=rows if logprobs else None)


def output(ids: list[int], *samples: Any, prompt: str | None = "w5") -> Any:
    return SimpleNamespace(prompt=prompt, prompt_token_ids=ids, outputs=list(samples))


def length(completion: str) -> float:
    return float(len(completion))


def test_groups_keep_ids_logprobs_and_ends() -> None:
    outputs = [output([5], sample([6, 2], "a"), sample([7], "bbb", "length")), output([8], sample([3]), sample([4]))]
    first, second = parse_vllm_outputs(outputs, 2, length)
    one, two = first.rollouts
    assert (one.prompt_ids, one.completion_ids, one.truncated, one.text) == ([5], [6, 2], False, "a")
    assert one.rollout_logprobs.tolist() == [-3.0, -1.0]
    assert one.old_logprobs is one.rollout_logprobs
    assert two.truncated
    assert [r.reward for r in first] == [1.0, 3.0]
    assert {r.group_id for r in first} != {r.group_id for r in second}
    assert first.compute_advantages().tolist() == [-1.0, 1.0] == [r.advantage for r in first]
    assert compute_advantages([1.0, 3.0], 2).tolist() == [-1.0, 1.0]


def test_a_group_may_be_the_same_prompt_several_times() -> None:
    outputs = [output([5], sample([i])) for i in (6, 7)] + [output([8], sample([i])) for i in (3, 4)]
    batches = parse_vllm_outputs(outputs, 2, length)
    assert [[r.completion_ids for r in b] for b in batches] == [[[6], [7]], [[3], [4]]]


def test_rewards_get_ground_truths_and_prompts() -> None:
    outputs = [output([5], sample([6], "x"), prompt="p"), output([7], sample([8], "y"), prompt="q")]
    seen: list[Any] = []

    def reward(completion: str, ground_truth: Any, prompt: str) -> float:
        seen.append((completion, ground_truth, prompt))
        return 1.0

    parse_vllm_outputs(outputs, 1, reward, ground_truths=[10, 20])
    assert sorted(seen) == [("x", 10, "p"), ("y", 20, "q")]
    with pytest.warns(UserWarning, match="takes a ground truth and none was given"):
        parse_vllm_outputs(outputs, 1, reward)


def test_a_rollout_nobody_scored_has_no_advantage() -> None:
    (batch,) = parse_vllm_outputs([output([5], sample([6]), sample([7]))], 2)
    with pytest.raises(ValueError, match="none of 2 rollouts has a reward"):
        batch.compute_advantages()
    for reward, rollout in enumerate(batch):
        rollout.reward = reward
    assert batch.compute_advantages(scale=True).tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])
    (abstains,) = parse_vllm_outputs([output([5], sample([6]), sample([7]))], 2, lambda text: None)
    assert abstains.compute_advantages().tolist() == [0.0, 0.0]
    assert RolloutBatch([]).compute_advantages().tolist() == []


@pytest.mark.parametrize(
    ("outputs", "args", "message"),
    [
        ([output([5], sample([6]), sample([7]), sample([8]))], {}, "group_size=2 does not divide the 3 completions"),
        ([output([5], sample([6])), output([8], sample([7]))], {}, "group 0 has completions of different prompts"),
        ([output([5], sample([6], logprobs=False), sample([7]))], {}, r"SamplingParams\(logprobs=0\)"),
        ([output([5], sample([6], reason="abort"), sample([7]))], {}, "finish_reason='abort'"),
        ([output([5], sample([6]), sample([7]))], {"ground_truths": [1, 2]}, "2 ground_truths for 1 groups"),
    ],
)
def test_outputs_that_make_no_groups(outputs: Any, args: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_vllm_outputs(outputs, 2, **args)


def test_a_reward_that_raises_is_named() -> None:
    with pytest.raises(RuntimeError, match="'bad' failed on prompt row 0, completion 'x'"):
        parse_vllm_outputs([output([5], sample([6], "x"))], 1, bad)


def bad(completion: str) -> float:
    raise KeyError("no")


@pytest.mark.parametrize("batched", [False, True])
def test_the_prompt_never_counts_in_the_loss(batched: bool) -> None:
    model, ids = tiny_model(), torch.tensor([5, 9, 17, 4, 8])
    right = by_hand(model, [5, 9], [17, 4, 8])
    logits = model(ids[None]).logits
    logprobs = get_logprobs(logits if batched else logits[0], ids[None] if batched else ids)
    assert torch.allclose(logprobs[-3:], right, atol=1e-5)
    old = right - 0.1
    loss = clipped_policy_loss(logprobs[None] if batched else logprobs, old, 2.0)
    assert float(loss) == pytest.approx(-2.0 * float(torch.tensor(0.1).exp()), abs=1e-4)
