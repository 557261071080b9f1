"""Two gloo ranks of which one fails, has nothing to train on, or has less to do than the other."""

import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightrl import RLModule, stream
from lightrl.datamodule import SizedLoader
from lightrl.distributed import rank
from lightrl.moves import even_out
from lightrl.packing import StepBatch, pack
from lightrl.strategies import ColocatedHFStrategy
from lightrl.types import Prompt, Rollout, RolloutBatch, RolloutGroup
from tests.helpers.fits import quiet_trainer, tiny_data, whole_weights
from tests.helpers.ranks import STRATEGIES, Samples, SGDModule, keep, of_each_rank, run
from tests.helpers.tiny import tiny_model, tiny_prompts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

THIS = "tests.strategies.test_failing_ranks"


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
    done = run(THIS, "boom", tmp_path, name, timeout=180, check=False)
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
    run(THIS, "idle", tmp_path, timeout=240)
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
    run(THIS, "moves", tmp_path, timeout=240)
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
    run(THIS, "nan", tmp_path, timeout=240)
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


if __name__ == "__main__":
    programs = {"boom": boom_main, "idle": idle_main, "moves": moves_main, "nan": nan_main}
    programs[sys.argv[1]](*sys.argv[2:])
