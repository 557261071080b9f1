"""Loops of one's own: the examples learn, the first design's programs run, two ranks share a model."""

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lightrl import WeightManager
from tests.helpers.fits import BAR
from tests.helpers.programs import server
from tests.helpers.tiny import save_tiny, tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]


def rises(rewards: list[float]) -> bool:
    third = len(rewards) // 3
    return sum(rewards[-third:]) > 2 * sum(rewards[:third]) and sum(rewards[-third:]) / third > 0.15


# -- the loops of the examples -----------------------------------------------------------------------------------------


def test_the_colocated_loop_learns(tmp_path: Path) -> None:
    from examples.own_the_loop import colocated

    assert len(Path(colocated.__file__).read_text().splitlines()) <= 40
    torch.manual_seed(0)
    assert rises(colocated.main(steps=9, out=str(tmp_path)))


def test_the_loop_in_fabric_runs(tmp_path: Path) -> None:
    from examples.own_the_loop import fabric

    assert len(fabric.main(steps=2, out=str(tmp_path), accelerator="cpu")) == 2
    assert list(tmp_path.rglob("metrics.csv"))


def test_a_head_on_hidden_states_is_trained(tmp_path: Path) -> None:
    from examples.own_the_loop import value_head

    torch.manual_seed(0)
    errors = value_head.main(steps=4, out=str(tmp_path))
    assert all(e < 2.0 for e in errors)
    saved = torch.load(tmp_path / "value_head.pt")
    assert all(state["step"] == 4 for state in saved["manager"]["optimizer"]["state"].values())
    assert saved["manager"]["optimizer"]["state"][len(saved["manager"]["optimizer"]["state"]) - 1]["exp_avg"].any()


def test_the_loop_in_two_processes_learns(tmp_path: Path) -> None:
    from examples.own_the_loop import async_worker

    address, out = f"ipc://{tmp_path}/queue.sock", str(tmp_path / "run")
    torch.manual_seed(0)
    with server("-m", "examples.own_the_loop.async_server", "--address", address, "--out", out):
        assert rises(async_worker.main(steps=14, address=address, out=out))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


# -- the two programs of the first design, as they were written --------------------------------------------------------

COLOCATED = """
wm = WeightManager(path, lr=1e-3)
for step in range(2):
    llm = wm.as_vllm()
    outputs = llm.generate(prompts, SamplingParams(n=8, temperature=1.0, logprobs=1))
    batches = parse_vllm_outputs(outputs, group_size=8, reward_fn=f)
    for b in batches:
        b.compute_advantages()
    model, optimizer = wm.as_trainable()
    train(model, optimizer, batches)
"""
SCRIPT_A = """
import sys
from lightrl import RolloutServer
RolloutServer(sys.argv[1], queue_address=sys.argv[2]).run(["w5 w9", "w7", "w8 w3"])
"""
SCRIPT_B = """
worker = TrainWorker(path, queue_address, lr=1e-3)
for batches in worker.pull_rollouts():
    for b in batches:
        for rollout in b:
            rollout.reward = f(rollout.text)
        b.compute_advantages()
    train(worker.model, worker.optimizer, batches)
    worker.sync_weights()
    pulled.append(len(batches))
    if len(pulled) == 3:
        break
"""


def f(completion: str) -> float:
    return float(len(completion.split()) % 3)


def four_passes(model: Any, optimizer: Any, batches: Any) -> None:
    from lightrl import clipped_policy_loss, get_logprobs

    for _ in range(4):
        for rollout in [r for b in batches for r in b][:8]:
            out = model(rollout.token_ids, output_hidden_states=True)
            new_logprobs = get_logprobs(out.logits, rollout.token_ids)
            loss = clipped_policy_loss(new_logprobs, rollout.old_logprobs, rollout.advantage)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def run_as_written(program: str, **names: Any) -> None:
    import vllm

    import lightrl

    public = {name: getattr(lightrl, name) for name in lightrl.__all__}
    exec(program, public | {"SamplingParams": vllm.SamplingParams, "f": f, "train": four_passes} | names)


def test_the_colocated_program_of_the_first_design(folder: Path) -> None:
    run_as_written(COLOCATED, path=folder, prompts=["w5 w9", "w7"])


def test_the_async_program_of_the_first_design(folder: Path, tmp_path: Path) -> None:
    address, pulled = f"ipc://{tmp_path}/queue.sock", []
    with server("-c", SCRIPT_A, str(folder), address):
        run_as_written(SCRIPT_B, path=folder, queue_address=address, pulled=pulled)
        assert pulled == [8, 8, 8]
        gc.collect()


# -- two ranks ---------------------------------------------------------------------------------------------------------


def ranks_main(folder: str, rank: str, out: str) -> None:
    """Train for three steps on one of two ranks, then go on from a saved state."""
    import torch.distributed as dist
    from vllm import SamplingParams

    from lightrl import clipped_policy_loss, get_logprobs, parse_vllm_outputs
    from lightrl.sharding import full_tensor, reshard

    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=int(rank), world_size=2)
    manager = WeightManager(folder, lr=1e-2)
    prompt, gaps = ["w5 w9", "w7"][int(rank)], []
    for _ in range(3):
        llm = manager.as_vllm(max_model_len=32)
        outputs = llm.generate([prompt], SamplingParams(n=2, logprobs=0, max_tokens=6), use_tqdm=False)
        (batch,) = parse_vllm_outputs(outputs, 2, lambda text: float(len(text)))
        model, optimizer = manager.as_trainable()
        manager.as_vllm()
        model, optimizer = manager.as_trainable()
        optimizer.zero_grad()
        for rollout, advantage in zip(batch, (1.0, -0.5), strict=True):
            logprobs = get_logprobs(model(rollout.token_ids).logits, rollout.token_ids)
            gaps.append(float((logprobs[-len(rollout.completion_ids) :] - rollout.old_logprobs).abs().max()))
            clipped_policy_loss(logprobs, rollout.old_logprobs, advantage).backward()
        optimizer.step()
    state = manager.state_dict()
    again = WeightManager(folder, lr=1e-2)
    again.load_state_dict(state)
    manager.save_pretrained(f"{out}/saved")
    for each in (manager, again):
        each.optimizer.zero_grad()
        each.model(torch.tensor([5, 9, 4])).logits.square().mean().backward()
        each.optimizer.step()
        reshard(each.policy)
    both = zip(manager.policy.parameters(), again.policy.parameters(), strict=True)
    same = all(torch.equal(full_tensor(a.detach()), full_tensor(b.detach())) for a, b in both)
    pushes = manager.pushes
    manager.close()
    gc.collect()
    torch.save(
        {"gaps": gaps, "state": state, "same": same, "pushes": pushes, "group": dist.is_initialized()},
        f"{out}/{rank}.pt",
    )
    dist.barrier()
    dist.destroy_process_group()


def test_two_ranks_share_the_model_and_each_has_an_engine(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.test_own_the_loop", str(folder)]
    ranks = [subprocess.Popen([*command, str(r), str(tmp_path)], process_group=0) for r in (0, 1)]
    deadline = time.monotonic() + 300
    try:
        assert [p.wait(deadline - time.monotonic()) for p in ranks] == [0, 0]
    finally:
        for p in ranks:
            if p.poll() is None:
                os.killpg(p.pid, signal.SIGKILL)
                p.wait()
    first, second = (torch.load(tmp_path / f"{r}.pt") for r in (0, 1))
    for rank in (first, second):
        assert max(rank["gaps"]) < BAR
        assert rank["pushes"] == 3  # not where nothing changed
        assert rank["same"]
        assert rank["group"]
    ours, theirs = first["state"]["model"], second["state"]["model"]
    assert all(torch.equal(ours[n], theirs[n]) for n in ours)
    assert not torch.equal(ours["model.norm.weight"], tiny_model().model.norm.weight)
    alone = WeightManager(tmp_path / "saved", lr=1e-2)
    assert all(torch.equal(ours[n], p) for n, p in alone.policy.state_dict().items())
    alone.load_state_dict(first["state"])  # of two ranks, on one


if __name__ == "__main__":
    ranks_main(*sys.argv[1:])
