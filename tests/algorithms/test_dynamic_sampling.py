"""DAPO's dynamic sampling through a real Trainer: groups without spread are replaced, on one rank and on two."""

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from lightrl.algorithms import DAPO
from lightrl.distributed import rank
from lightrl.packing import StepBatch
from tests.helpers.tiny import tiny_model, tiny_prompts
from tests.helpers.training import equal, quiet_trainer, tiny_data, tiny_module, weights

pytestmark = pytest.mark.slow

Groups = dict[tuple[int, ...], list[float]]


class Watch(Callback):
    def __init__(self) -> None:
        self.groups: list[Groups] = []
        """Each step's rewards by prompt."""
        self.ids: list[list[list[int]]] = []
        self.logged: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: StepBatch, batch_idx: int) -> None:
        groups: Groups = {}
        for r in batch.rollouts:
            groups.setdefault(tuple(r.prompt_ids), []).append(r.reward)
        self.groups.append(groups)
        self.ids.append([[*r.prompt_ids, *r.completion_ids] for r in batch.rollouts])
        self.logged.append({name: float(v) for name, v in trainer.callback_metrics.items()})


def easy_if_odd(completion: str, ground_truth: str) -> float:
    """Every second prompt has one reward, whatever is said."""
    words = [int(w[1:]) for w in completion.split() if w[1:].isdigit()]
    return 1.0 if int(ground_truth) % 2 else sum(words) / 100


def data(**args: Any) -> Any:
    return tiny_data(tiny_prompts(24), **{"reward": easy_if_odd, "prompts_per_step": 4, "group_size": 3} | args)


def fit(module: Any, rollouts: Any, **args: Any) -> Watch:
    watch = Watch()
    callbacks = [watch, *args.pop("callbacks", [])]
    quiet_trainer(callbacks=callbacks, **args).fit(module, rollouts)
    return watch


def test_groups_without_spread_are_replaced_by_new_prompts() -> None:
    rollouts, module = data(), DAPO(tiny_model(), lr=1e-3)
    watch = fit(module, rollouts, max_steps=3)
    for groups in watch.groups:
        assert len(groups) == 4
        assert all(max(rewards) > min(rewards) for rewards in groups.values())
    rounds = [m["rollout/sampling_rounds"] for m in watch.logged]
    state = rollouts.state_dict()
    assert max(rounds) > 1
    assert state["batches"] == sum(rounds)
    position = state["order"]["epoch"] * 24 + state["order"]["position"]
    assert position > 12
    # What was sampled and refused counts in the metrics: of its groups, and only of these, there is no spread.
    assert watch.logged[0]["reward/zero_std_frac"] > 0


def test_what_is_kept_stays_in_its_place() -> None:
    replaced = fit(DAPO(tiny_model(), lr=1e-3), data(prompts_per_step=8), max_steps=1)
    plain = fit(tiny_module(), data(prompts_per_step=8), max_steps=1)
    (before,), (after,) = plain.groups, replaced.groups
    kept = [p for p, rewards in before.items() if max(rewards) > min(rewards)]
    assert 0 < len(kept) < 8
    assert [p for p in after if p in before] == kept
    assert all(after[p] == before[p] for p in kept)


def test_after_the_last_round_a_step_trains_on_what_there_is_and_says_so_once() -> None:
    with pytest.warns(UserWarning, match="after max_sampling_rounds=2 ") as caught:
        watch = fit(DAPO(tiny_model(), lr=1e-3, max_sampling_rounds=2), data(prompts_per_step=8), max_steps=3)
    assert sum("max_sampling_rounds" in str(w.message) for w in caught) == 1
    assert min(len(groups) for groups in watch.groups) < 8
    assert all(max(rewards) > min(rewards) for groups in watch.groups for rewards in groups.values())
    assert max(m["rollout/sampling_rounds"] for m in watch.logged) == 2


@pytest.mark.filterwarnings("ignore:after max_sampling_rounds")
def test_without_any_group_to_train_on_nothing_changes() -> None:
    module = DAPO(tiny_model(), lr=1e-3, max_sampling_rounds=3)
    watch = fit(module, data(reward=lambda completion: 1.0), max_steps=1)
    assert equal(weights(module.policy), weights(tiny_model()))
    (logged,) = watch.logged
    assert logged["train/loss"] == 0.0
    assert logged["rollout/sampling_rounds"] == 3
    assert all(value == value for value in logged.values())


def test_one_round_asks_about_no_group() -> None:
    once = fit(DAPO(tiny_model(), lr=1e-3, max_sampling_rounds=1), data(), max_steps=1)
    assert once.ids == fit(tiny_module(), data(), max_steps=1).ids
    assert "rollout/sampling_rounds" not in once.logged[0]


@pytest.mark.parametrize("reuse", [1, 2])
def test_a_resumed_run_ends_where_an_unbroken_one_does(reuse: int, tmp_path: Path) -> None:
    """With reuse the checkpoint is in the middle of a rollout batch that took several rounds."""
    arguments: dict[str, Any] = {"epochs_per_rollout": reuse}
    unbroken = DAPO(tiny_model(), lr=1e-2)
    right = fit(unbroken, data(**arguments), max_steps=5)
    save = ModelCheckpoint(tmp_path, save_last=True)
    first = fit(
        DAPO(tiny_model(), lr=1e-2), data(**arguments), max_steps=3, callbacks=[save], enable_checkpointing=True
    )
    assert first.logged[2 if reuse == 2 else 0]["rollout/sampling_rounds"] > 1
    resumed, watch = DAPO(tiny_model(seed=1), lr=1e-2), Watch()
    quiet_trainer(max_steps=5, callbacks=[watch]).fit(resumed, data(**arguments), ckpt_path=tmp_path / "last.ckpt")
    assert first.ids + watch.ids == right.ids
    assert equal(weights(resumed.policy), weights(unbroken.policy))


def few_steps(devices: int) -> tuple[list[list[list[int]]], dict[str, Any]]:
    module, rollouts = DAPO(tiny_model(), lr=1e-3), data(deterministic=True)
    watch = fit(module, rollouts, max_steps=2, devices=devices)
    return watch.ids, {name: rollouts.state_dict()[name] for name in ("order", "batches")}


@pytest.mark.slow
def test_two_ranks_replace_the_same_groups_by_the_same_prompts(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "tests.algorithms.test_dynamic_sampling", tmp_path], check=True, timeout=240)
    ranks = [torch.load(tmp_path / f"{r}.pt") for r in (0, 1)]
    ids, state = few_steps(1)
    assert ranks[0][1] == ranks[1][1] == state
    assert state["batches"] > 2
    for step in range(2):
        assert sorted(ranks[0][0][step] + ranks[1][0][step]) == sorted(ids[step])


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    found = few_steps(2)
    torch.save(found, Path(sys.argv[1]) / f"{rank()}.pt")
