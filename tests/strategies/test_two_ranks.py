"""Two gloo ranks: engines in tensor-parallel groups, ranks that fail, and the demo's task."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping

from examples.tiny.task import reward, write_task
from lightrl import RLModule, RolloutDataModule, stream
from lightrl.datamodule import SizedLoader
from lightrl.distributed import rank
from lightrl.environments import Episodes
from lightrl.moves import even_out
from lightrl.packing import StepBatch, pack
from lightrl.strategies import ColocatedHFStrategy, ColocatedVLLMStrategy
from lightrl.types import Prompt, Rollout, RolloutBatch, RolloutGroup
from tests.helpers.environments import Rollouts, Uneven
from tests.helpers.fits import BAR, Witness, ids_of, quiet_trainer, sampling, tiny_data, whole_weights, with_engine
from tests.helpers.tiny import tiny_model, tiny_prompts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STRATEGIES: dict[str, Callable[[], Any]] = {
    "hf": lambda: ColocatedHFStrategy(),
    "tp1": lambda: ColocatedVLLMStrategy(tensor_parallel_size=1),
    "tp2": lambda: ColocatedVLLMStrategy(tensor_parallel_size=2),
}
TIED = ("hf", "tp2")
STEPS = 3
GOOD = 0.9


def run(name: str, *args: Any, timeout: float = 600, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run one of the programs below on two ranks: Lightning starts the second."""
    command = [sys.executable, "-m", "tests.strategies.test_two_ranks", name, *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def of_each_rank(folder: Path) -> list[Any]:
    return [torch.load(folder / f"{r}.pt", weights_only=False) for r in (0, 1)]


def keep(folder: str, value: Any) -> None:
    torch.save(value, Path(folder) / f"{rank()}.pt")


# -- a few steps on each strategy -------------------------------------------------------------------------------------


class SGDModule(RLModule):
    """Adam would blow rounding up wherever a gradient is nearly nothing."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.policy.parameters(), lr=1.0)


class Samples(Callback):
    def __init__(self) -> None:
        self.ids: list[list[tuple[list[int], list[int]]]] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.ids.append([(r.prompt_ids, r.completion_ids) for r in batch.rollouts])


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
    run("strategies", folder)
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


# -- a rank that fails ------------------------------------------------------------------------------------------------


def boom_main(folder: str, name: str) -> None:
    """A reward that fails on rank 1 in the second step."""

    def explode(completion: str, ground_truth: Any) -> float:
        if rank() == 1 and trainer.global_step == 1:
            (Path(folder) / "raised").write_text(str(time.time()))
            raise ValueError("boom")
        return float(len(completion))

    trainer = quiet_trainer(STRATEGIES[name](), devices=2, max_steps=6, callbacks=[PidFile(folder)])
    trainer.fit(RLModule(tiny_model()), tiny_data(tiny_prompts(24), reward=explode))


class PidFile(Callback):
    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        (self.folder / f"rank{rank()}.pid").write_text(str(psutil.Process().pid))


def ends_within(seconds: float, pid: int) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("name", ["hf", pytest.param("tp1", marks=pytest.mark.vllm)])
def test_b45_an_error_on_one_rank_ends_both(name: str, tmp_path: Path) -> None:
    done = run("boom", tmp_path, name, timeout=180, check=False)
    assert time.time() - float((tmp_path / "raised").read_text()) < 60
    assert done.returncode != 0
    assert "boom" in done.stdout + done.stderr
    pids = [int(path.read_text()) for path in tmp_path.glob("rank*.pid")]
    assert len(pids) == 2
    assert all(ends_within(20, pid) for pid in pids)  # Lightning's launcher does not wait for those it kills


def idle_main(folder: str) -> None:
    """Nothing that rank 0 samples gets a reward; rank 1 trains."""

    def score(completion: str, ground_truth: Any) -> float | None:
        return None if rank() == 0 else float(len(completion))

    trainer = quiet_trainer(ColocatedHFStrategy(), devices=2, max_steps=3)
    module = RLModule(tiny_model(), lr=0.01)
    # One prompt on each rank: there is no group that it would help to move.
    data = tiny_data(tiny_prompts(12), reward=score, prompts_per_step=2, max_tokens_per_micro_batch=20)
    trainer.fit(module, data)
    keep(folder, (trainer.global_step, whole_weights(module), float(trainer.callback_metrics["train/loss"])))


def test_b45_a_rank_with_nothing_to_train_on_takes_part(tmp_path: Path) -> None:
    run("idle", tmp_path, timeout=240)
    (steps, weights, loss), (other_steps, other_weights, other_loss) = of_each_rank(tmp_path)
    assert steps == other_steps == 3
    assert loss == other_loss
    start = dict(tiny_model().named_parameters())
    for name, tensor in weights.items():
        assert torch.equal(tensor, other_weights[name])
        assert torch.isfinite(tensor).all()
        assert not torch.equal(tensor, start[name])


def moves_main(folder: str) -> None:
    """Nothing that rank 0 samples gets a reward; some of what rank 1 samples is trained on there, or is not."""

    def score(completion: str, ground_truth: Any) -> float | None:
        return None if rank() == 0 else float(len(completion))

    made = []
    for work in (even_out, lambda groups, cost: groups):
        stream.even_out = work
        module, samples = SGDModule(tiny_model(), kl_coef=0.1), Samples()
        data = tiny_data(tiny_prompts(16), reward=score, prompts_per_step=8, deterministic=True)
        quiet_trainer(ColocatedHFStrategy(), devices=2, max_steps=2, callbacks=[samples]).fit(module, data)
        made.append((samples.ids, whole_weights(module)))
    keep(folder, made)


def test_groups_move_to_the_rank_with_less_to_do_and_the_update_stays_the_same(tmp_path: Path) -> None:
    run("moves", tmp_path, timeout=240)
    (first, dealt), (second, sampled) = of_each_rank(tmp_path)
    assert [len(ids) for ids in dealt[0]] == [0, 0]
    assert [len(ids) for ids in sampled[0]] == [12, 12]
    assert all(6 >= len(ids) >= 3 for ids in first[0])
    for moved, others, here in zip(first[0], second[0], sampled[0], strict=True):
        assert sorted(moved + others) == sorted(here)
    for name, right in sampled[1].items():
        assert torch.equal(first[1][name], second[1][name])
        torch.testing.assert_close(first[1][name], right, rtol=0, atol=1e-5)


def nan_main(folder: str) -> None:
    """One logprob of rank 1 is NaN in the second step; before it, one in the KL of a reward is."""
    made: dict[str, Any] = {}
    module = RLModule(tiny_model(), lr=0.01)
    steps = [nan_step(bad=False), nan_step(bad=rank_to_be() == 1)]
    try:
        quiet_trainer(ColocatedHFStrategy(), devices=2, max_steps=2).fit(module, SizedLoader(2, lambda i: steps[i]))
    except RuntimeError as error:
        made["loss"] = str(error)
    made["weights"] = whole_weights(module)
    rewarded = RLModule(tiny_model(), kl_coef=0.1, kl_in_reward=True)
    try:
        rewarded.rewards(RolloutBatch([RolloutGroup(Prompt([3]), steps[1].rollouts)]))
    except RuntimeError as error:
        made["reward"] = str(error)
    keep(folder, made)


def rank_to_be() -> int:
    """This process's rank, before Lightning has made the process group."""
    return int(os.environ.get("LOCAL_RANK", 0))


def nan_step(bad: bool) -> StepBatch:
    rollouts = [Rollout([3], [4, 5, i], torch.zeros(3), reward=1.0, advantage=1.0) for i in (5, 6)]
    for r in rollouts:
        r.ref_logprobs = torch.zeros(3)
    if bad:
        rollouts[1].rollout_logprobs = torch.tensor([0.0, float("nan"), 0.0])
    return StepBatch([pack(rollouts, temperature=1.0, denominator=12.0)], 0, rollouts)


def test_a_fault_of_one_rank_is_named_there_and_ends_both(tmp_path: Path) -> None:
    run("nan", tmp_path, timeout=240)
    first, second = of_each_rank(tmp_path)
    where = "logprobs is nan at completion token 1 of rollout 1 (token ids 3, 4, 5, 6)"
    for place, tensor in (("loss", "rollout"), ("reward", "old")):
        assert "another rank names the rollout" in first[place]
        assert f"{tensor}_{where}" in second[place]
    assert "step 1: " in first["loss"]
    assert "step 1: " in second["loss"]
    start = dict(tiny_model().named_parameters())
    for name, tensor in first["weights"].items():
        assert torch.equal(tensor, second["weights"][name])
        assert torch.isfinite(tensor).all()
        assert not torch.equal(tensor, start[name])  # by the first step


# -- the demo's task --------------------------------------------------------------------------------------------------


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
    run("demo", tmp_path)
    (before, after, steps), (other_before, other_after, other_steps) = of_each_rank(tmp_path)
    assert (before, after, steps) == (other_before, other_after, other_steps)
    assert before < 0.2
    assert after >= GOOD


if __name__ == "__main__":
    programs = {
        "strategies": strategies_main,
        "boom": boom_main,
        "idle": idle_main,
        "moves": moves_main,
        "nan": nan_main,
        "demo": demo_main,
    }
    programs[sys.argv[1]](*sys.argv[2:])
