"""Generation with the policy itself, against forwards by hand."""

from typing import Any

import pytest
import torch

from lightrl import RLModule, Sampling
from lightrl.engines.hf import HFEngine
from lightrl.types import Completion
from tests.helpers.fits import (
    BAR,
    Witness,
    fit,
    gap,
    ids_of,
    quiet_trainer,
    sampling,
    tiny_data,
    whole_weights,
    with_engine,
)
from tests.helpers.tiny import by_hand, tiny_model, tiny_prompts

RAGGED = [[0, 9, 17], [4], [6, 7, 8, 9, 10, 11]]  # 0 is also what a rectangle is filled with
CPU = torch.device("cpu")


def sample(prompts: list[list[int]], **args: Any) -> list[list[Completion]]:
    with torch.no_grad():
        return HFEngine(tiny_model(), CPU).generate(prompts, sampling(**args), policy_version=7)


def largest_gap(prompts: list[list[int]], groups: list[list[Completion]], temperature: float = 1.0) -> float:
    model = tiny_model()
    return max(gap(model, c, temperature, p) for p, group in zip(prompts, groups, strict=True) for c in group)


def greedy_by_hand(prompt: list[int], steps: int, stop: int) -> list[int]:
    model, ids = tiny_model(), list(prompt)
    with torch.no_grad():
        for _ in range(steps):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] == stop:
                break
    return ids[len(prompt) :]


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_b09_sampled_logprobs_are_of_the_sampling_temperature(temperature: float) -> None:
    groups = sample(RAGGED, temperature=temperature)
    assert largest_gap(RAGGED, groups, temperature) < 1e-5


def test_b11_logprobs_belong_to_their_own_token() -> None:
    [[completion], *_] = sample(RAGGED, num_completions=1, stop_token_ids=())
    right = by_hand(tiny_model(), RAGGED[0], completion.token_ids)
    assert len(completion.logprobs) == len(completion.token_ids) == 6
    assert torch.allclose(completion.logprobs, right, atol=1e-5)
    assert not torch.allclose(completion.logprobs[1:], right[:-1], atol=1e-2)
    assert not torch.allclose(completion.logprobs[:-1], right[1:], atol=1e-2)


def test_greedy_takes_the_likeliest_token() -> None:
    groups = sample(RAGGED, num_completions=1, temperature=0.0)
    assert ids_of(groups) == [[greedy_by_hand(p, 6, stop=2)] for p in RAGGED]
    assert largest_gap(RAGGED, groups) < 1e-5


def test_padding_on_the_left_changes_nothing() -> None:
    together = sample(RAGGED, num_completions=1, temperature=0.0)
    for prompt, [completion] in zip(RAGGED, together, strict=True):
        [[alone]] = sample([prompt], num_completions=1, temperature=0.0)
        assert alone.token_ids == completion.token_ids
        assert torch.allclose(alone.logprobs, completion.logprobs, atol=1e-5)


def test_a_completion_ends_with_its_stop_token_or_is_truncated() -> None:
    stops = tuple(range(2, 12))  # a third of the vocabulary, so that both happen
    flat = [c for group in sample(RAGGED, num_completions=8, stop_token_ids=stops) for c in group]
    assert {c.truncated for c in flat} == {True, False}
    for c in flat:
        assert c.truncated == (c.token_ids[-1] not in stops)
        assert not set(c.token_ids[:-1]) & set(stops)
        assert len(c.logprobs) == len(c.policy_versions) == len(c.token_ids)
        assert set(c.policy_versions.tolist()) == {7}
        assert not c.truncated or len(c.token_ids) == 6


def test_seeded_completions_do_not_depend_on_the_batch() -> None:
    seeds = (7, 8, 9)
    together = ids_of(sample(RAGGED, seed=1, prompt_seeds=seeds))
    backwards = ids_of(sample(RAGGED[::-1], seed=2, prompt_seeds=seeds[::-1]))
    alone = [ids_of(sample([p], prompt_seeds=(s,)))[0] for p, s in zip(RAGGED, seeds, strict=True)]
    assert together == backwards[::-1] == alone
    assert ids_of(sample(RAGGED, seed=1)) != [ids_of(sample([p], seed=1))[0] for p in RAGGED]


def test_b32_samples_of_a_prompt_differ_and_equal_seeds_repeat() -> None:
    for seeds in ((), (5, 6)):
        first = ids_of(sample([RAGGED[0]] * 2, num_completions=4, max_completion_tokens=16, seed=1, prompt_seeds=seeds))
        again = ids_of(sample([RAGGED[0]] * 2, num_completions=4, max_completion_tokens=16, seed=1, prompt_seeds=seeds))
        assert first == again
        assert len({tuple(ids) for group in first for ids in group}) == 8
    assert ids_of(sample(RAGGED, seed=1)) != ids_of(sample(RAGGED, seed=2))


def test_generation_leaves_random_state_and_policy_alone() -> None:
    torch.manual_seed(3)
    before, model = torch.get_rng_state(), tiny_model().train()
    kept = model.generation_config
    HFEngine(model, CPU).generate(RAGGED, sampling(), 0)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training
    assert model.generation_config is kept


def test_evaluation_may_narrow_the_distribution() -> None:
    likeliest = sample(RAGGED, num_completions=3, top_k=1)
    assert ids_of(likeliest) == [[greedy_by_hand(p, 6, stop=2)] * 3 for p in RAGGED]


def test_a_short_fit_trains_on_its_own_samples() -> None:
    witness = Witness()
    data = tiny_data(val_prompts=tiny_prompts(3))
    module, trainer = fit(
        tiny_model(), "colocated_hf", data=data, callbacks=[witness], max_steps=3, val_check_interval=1
    )
    assert witness.versions == [(0, 0), (1, 1), (2, 2)]
    assert max(witness.gaps) < BAR
    assert min(witness.stale_gaps) > 0.01
    start = dict(tiny_model().named_parameters())
    assert all(not torch.equal(p, start[name]) for name, p in whole_weights(module).items())
    assert trainer.callback_metrics["kl/mismatch"] < 1e-8


@pytest.mark.slow
def test_deterministic_runs_repeat() -> None:
    def run() -> dict[str, torch.Tensor]:
        module, _ = fit(tiny_model(), "colocated_hf", data=tiny_data(deterministic=True), max_steps=2)
        return whole_weights(module)

    first, again = run(), run()
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_engine_scores_at_temperature_one() -> None:
    def body(strategy: Any) -> None:
        for ids, found in zip(RAGGED[::2], strategy._engine.score(RAGGED[::2]), strict=True):
            assert torch.allclose(found, by_hand(tiny_model(), ids[:1], ids[1:]), atol=1e-5)

    with_engine(tiny_model(), body, "colocated_hf")


def test_fast_dev_run_is_one_step() -> None:
    trainer = quiet_trainer("colocated_hf", fast_dev_run=True)
    trainer.fit(RLModule(tiny_model()), tiny_data(val_prompts=tiny_prompts(3)))
    assert trainer.global_step == 1


def test_a_module_stays_with_the_precision_that_it_was_trained_in() -> None:
    module = RLModule(tiny_model())
    quiet_trainer("colocated_hf", max_steps=1, precision="bf16-mixed").fit(module, tiny_data())
    with pytest.raises(ValueError, match="ready for 'bf16-mixed': make a new RLModule"):
        quiet_trainer("colocated_hf", max_steps=1).fit(module, tiny_data())
    quiet_trainer("colocated_hf", max_steps=1, precision="bf16-mixed").fit(module, tiny_data())


def test_training_needs_the_whole_distribution() -> None:
    with pytest.raises(ValueError, match=r"top_p=0\.9"):
        Sampling(4, top_p=0.9).for_training()
