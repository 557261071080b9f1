"""Two gloo ranks do what one does, with engines in tensor-parallel groups too, and learn the demo's task."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping

from examples.tiny.task import reward, write_task
from lightrl import RLModule, RolloutDataModule
from lightrl.environments import Episodes
from lightrl.strategies import ColocatedHFStrategy, ColocatedVLLMStrategy
from tests.helpers.environments import Rollouts, Uneven
from tests.helpers.fits import BAR, Witness, ids_of, quiet_trainer, sampling, tiny_data, whole_weights, with_engine
from tests.helpers.ranks import STRATEGIES, Samples, SGDModule, keep, of_each_rank, run
from tests.helpers.tiny import tiny_model, tiny_prompts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

THIS = "tests.strategies.test_two_ranks"
TIED = ("hf", "tp2")
STEPS = 3
GOOD = 0.9


def few_steps(strategy: Any, tied: bool, devices: int) -> dict[str, Any]:
    witness, samples = Witness(), Samples()
    module = SGDModule(tiny_model(tied=tied))
    data = tiny_data(tiny_prompts(12), deterministic=True)
    quiet_trainer(strategy, devices=devices, callbacks=[witness, samples], max_steps=STEPS).fit(module, data)
    return {
        "gaps": witness.gaps,
        "stale_gaps": witness.stale_gaps,
        "versions": witness.versions,
        "samples": samples.ids,
        "weights": whole_weights(module),
    }


def samples_of_one_prompt(strategy: Any) -> dict[str, Any]:
    """What each of two equal prompts, one a rank, gets, and what the rank's own vLLM returned."""
    made: dict[str, Any] = {"raw": []}

    def body(strategy: Any) -> None:
        sample = strategy._engine._sample

        def noted(prompts: Any, seeds: Any, how: Any) -> Any:
            outputs = sample(prompts, seeds, how)
            made["raw"].append([[list(o.token_ids) for o in group] for group in outputs])
            return outputs

        strategy._engine._sample = noted
        for name, seed in {"step 1": 1, "step 2": 2, "step 1 again": 1}.items():
            how = sampling(num_completions=4, max_completion_tokens=16, seed=seed)
            made[name] = ids_of(strategy.generate([[5, 9, 17]], how))[0]

    with_engine(tiny_model(), body, strategy, devices=2)
    return made


def uneven_episodes(strategy: Any) -> dict[str, Any]:
    """Two steps with episodes that are over on one rank long before they are on the other."""
    watch = Rollouts()
    how = {"environment": Episodes(Uneven, max_turn_tokens=4), "reward": None, "max_completion_tokens": 40}
    quiet_trainer(strategy, devices=2, callbacks=[watch], max_steps=2).fit(RLModule(tiny_model()), tiny_data(**how))
    return {"turns": [r.turns for step in watch.trained for r in step], "logged": watch.logged[-1]}


def strategies_main(folder: str) -> None:
    made = {}
    for name in STRATEGIES:
        made[name] = few_steps(STRATEGIES[name](), tied=name in TIED, devices=2)
        if name != "hf":
            made[name] |= samples_of_one_prompt(STRATEGIES[name]())
        if name != "tp1":
            made[name]["episodes"] = uneven_episodes(STRATEGIES[name]())
    keep(folder, made)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw of each strategy: one pair of processes for all, since vLLM takes its time to import."""
    folder = tmp_path_factory.mktemp("strategies")
    run(THIS, "strategies", folder)
    return of_each_rank(folder)


@pytest.fixture(params=list(STRATEGIES))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.vllm
def test_engine_logprobs_are_the_trainers_on_both_ranks(seen: list[dict[str, Any]], name: str) -> None:
    for on_rank in (seen[0][name], seen[1][name]):
        assert on_rank["versions"] == [(i, i) for i in range(STEPS)]
        assert len(on_rank["gaps"]) == STEPS
        assert max(on_rank["gaps"]) < BAR
        assert min(on_rank["stale_gaps"]) > 0.01


@pytest.mark.vllm
def test_two_ranks_do_what_one_does(seen: list[dict[str, Any]], name: str) -> None:
    """Seeded completions are the same wherever they are sampled, and so are the updates made of them."""
    strategy = ColocatedHFStrategy() if name == "hf" else ColocatedVLLMStrategy()
    alone = few_steps(strategy, tied=name in TIED, devices=1)
    first, second = seen[0][name], seen[1][name]
    for step in range(STEPS):
        assert sorted(first["samples"][step] + second["samples"][step]) == sorted(alone["samples"][step])
    for parameter, right in alone["weights"].items():
        assert torch.equal(first["weights"][parameter], second["weights"][parameter])
        torch.testing.assert_close(first["weights"][parameter], right, rtol=0, atol=1e-5)


@pytest.mark.vllm
@pytest.mark.parametrize("name", ["hf", "tp2"])
def test_ranks_play_episodes_of_different_lengths_together(seen: list[dict[str, Any]], name: str) -> None:
    """Ranks that take turns in rounds, and two ranks of one engine: neither may wait for the other for ever."""
    episodes = [on_rank[name]["episodes"] for on_rank in seen]
    assert set().union(*(e["turns"] for e in episodes)) == {1, 4}  # on which rank is the balance's to say
    for logged in (e["logged"] for e in episodes):
        assert logged["rollout/turns_mean"] == 2.5
        assert logged["kl/mismatch"] < 1e-6


@pytest.mark.vllm
def test_b32_replicas_sample_different_completions(seen: list[dict[str, Any]]) -> None:
    first, second = (on_rank["tp1"] for on_rank in seen)
    together = first["step 1"] + second["step 1"] + first["step 2"] + second["step 2"]
    assert len({tuple(ids) for ids in together}) == 16
    assert first["step 1"] == first["step 1 again"]
    assert second["step 1"] == second["step 1 again"]


@pytest.mark.vllm
def test_b32_tensor_parallel_peers_sample_the_same(seen: list[dict[str, Any]]) -> None:
    first, second = (on_rank["tp2"] for on_rank in seen)
    assert first["raw"] == second["raw"]
    assert [len(groups) for groups in first["raw"]] == [2, 2, 2]
    assert [first["step 1"], second["step 1"]] == first["raw"][0]
    assert len({tuple(ids) for ids in first["step 1"] + second["step 1"]}) == 8
    assert first["step 1"] == first["step 1 again"] != first["step 2"]


def demo_main(folder: str) -> None:
    task = write_task(folder)
    module = RLModule(task.model_dir, lr=1e-3)
    data = RolloutDataModule(
        str(task.train), reward=reward, max_completion_tokens=3, val_prompts=str(task.test), seed=0
    )
    enough = EarlyStopping("val/pass@1", mode="max", stopping_threshold=GOOD, patience=100)
    trainer = quiet_trainer(
        devices=2,
        max_steps=160,
        gradient_clip_val=1.0,
        val_check_interval=20,
        check_val_every_n_epoch=None,
        callbacks=[enough],
    )
    before = trainer.validate(module, data, verbose=False)[0]["val/pass@1"]
    trainer.fit(module, data)
    keep(folder, (before, trainer.validate(module, data, verbose=False)[0]["val/pass@1"], trainer.global_step))


@pytest.mark.vllm
def test_two_ranks_learn_the_demos_task(tmp_path: Path) -> None:
    run(THIS, "demo", tmp_path)
    (before, after, steps), (other_before, other_after, other_steps) = of_each_rank(tmp_path)
    assert (before, after, steps) == (other_before, other_after, other_steps)
    assert before < 0.2
    assert after >= GOOD


if __name__ == "__main__":
    {"strategies": strategies_main, "demo": demo_main}[sys.argv[1]](*sys.argv[2:])
