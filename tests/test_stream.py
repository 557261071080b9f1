"""The stream of optimizer steps through a real Trainer: order, reuse, repetition."""

from collections import Counter

import pytest

from tests.helpers.tiny import by_hand, row, tiny_model, tiny_tokenizer
from tests.helpers.training import fit, quiet_trainer, tiny_data, tiny_module


def test_prompts_left_over_are_carried_into_the_next_epoch() -> None:
    watch = fit(tiny_data([row(i) for i in range(10)], prompts_per_step=4), max_steps=5)
    assert [len(prompts) for prompts in watch.trained] == [4] * 5
    assert set(Counter(p for prompts in watch.trained for p in prompts).values()) == {2}
    assert len({p for prompts in watch.trained[:2] for p in prompts}) == 8


@pytest.mark.parametrize(("reuse", "steps"), [((1, 1), 2), ((2, 3), 12)])
def test_the_length_of_an_epoch(reuse: tuple[int, int], steps: int) -> None:
    data = tiny_data(
        [row(i) for i in range(5)],
        max_completion_tokens=1,
        epochs_per_rollout=reuse[0],
        minibatches_per_rollout=reuse[1],
    )
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(tiny_module(), data)
    assert len(data.train_dataloader()) == trainer.num_training_batches == trainer.global_step == steps


def test_reused_rollouts_are_each_in_one_mini_batch_a_pass() -> None:
    module = tiny_module(lr=1e-2)
    data = tiny_data(group_size=4, epochs_per_rollout=2, minibatches_per_rollout=3)
    watch = fit(data, module, max_steps=12)
    for first in (0, 6):
        passes = [watch.steps[first + 3 * i : first + 3 * i + 3] for i in range(2)]
        orders = []
        for mini in passes:
            assert [len(s.rollouts) for s in mini] == [3, 3, 2]
            orders.append([tuple(map(int, r.token_ids)) for s in mini for r in s.rollouts])
        assert len(orders[0]) == 8
        assert Counter(orders[0]) == Counter(orders[1])
        assert orders[0] != orders[1], "not reshuffled"
        assert {s.policy_version for s in watch.steps[first : first + 6]} == {first}
    for step in watch.steps[:6]:  # of the very first policy, also when five updates have passed
        for r in step.rollouts:
            assert r.scored_logprobs is not None
            assert (r.scored_logprobs - by_hand(tiny_model(), r.prompt_ids, r.completion_ids)).abs().max() < 1e-5
        old = [m.old_logprobs for m in step.micro]
        if step is watch.steps[0]:  # in the first update old is current, to the last bit
            assert old == [None] * len(old)
            continue
        assert all(o is not None and len(o) == len(m.targets) for o, m in zip(old, step.micro, strict=True))
    assert [m["rollout/staleness_max"] for m in watch.logged] == [0.0] * 12
    assert all(s.measured == watch.steps[i // 6 * 6].measured for i, s in enumerate(watch.steps))


def test_the_first_step_on_reused_rollouts_clips_nothing_and_later_ones_do() -> None:
    data = tiny_data(group_size=4, epochs_per_rollout=3)
    watch = fit(data, tiny_module(lr=5e-2, clip_ratio_low=0.01, clip_ratio_high=0.01), max_steps=3)
    clipped = [m["train/clip_frac"] for m in watch.logged]
    assert clipped[0] == 0
    assert max(clipped[1:]) > 0


def test_a_run_repeats_itself_and_a_second_fit_begins_at_the_first_prompt() -> None:
    data, other = tiny_data(), tiny_data()
    runs = [fit(d, tiny_module(), max_steps=3).sampled for d in (data, data, other)]
    assert runs[0] == runs[1] == runs[2]
    assert fit(tiny_data(seed=2), max_steps=3).sampled != runs[0]
    unshuffled = fit(tiny_data([row(i) for i in range(6)], shuffle=False), max_steps=3)
    ids = tiny_tokenizer()([row(i) for i in range(6)])["input_ids"]
    assert [p for prompts in unshuffled.trained for p in prompts] == [tuple(i) for i in ids]


def test_other_prompts_given_to_a_datamodule_are_those_of_its_next_run() -> None:
    data, module = tiny_data([row(0), row(1)], val_prompts=[row(0)]), tiny_module()
    fit(data, module, max_steps=1)
    data.train_prompts, data.val_prompts = [row(2), row(3)], [row(i) for i in range(3)]
    later = fit(data, module, max_epochs=1)
    known = fit(tiny_data([row(2), row(3)]), max_steps=1)
    assert sorted(later.trained[0]) == sorted(known.trained[0])
    assert len(later.validated[0].groups) == 3


def test_samples_differ_between_completions_and_steps() -> None:
    watch = fit(tiny_data(["w5", "w5"], group_size=4, max_completion_tokens=8), tiny_module(lr=0.0), max_steps=2)
    everything = [s for step in watch.sampled for s in step]
    assert len(set(everything)) == len(everything) == 16


def test_deterministic_samples_do_not_depend_on_the_batch() -> None:
    """A seed for each completion: a prompt at the same place gets the same samples, whatever is beside it."""
    found = []
    for prompts in (["w5", "w6"], ["w5", "w9 w8 w7"]):
        data = tiny_data(prompts, shuffle=False, deterministic=True, group_size=3, max_completion_tokens=6)
        found.append(fit(data, max_steps=1).sampled[0])
    assert found[0][:3] == found[1][:3]
    assert len(set(found[0])) == 6
