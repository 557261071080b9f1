"""Server and worker in two processes: which weights rollouts are of, what is refused, what is left behind."""

import gc
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightrl import RolloutServer, TrainWorker
from lightrl.engines import secure
from lightrl.pools.pool import EngineDiedError
from tests.helpers.fits import BAR
from tests.helpers.programs import server
from tests.helpers.tiny import by_hand, save_tiny, tiny_model, tiny_prompts, tiny_tokenizer

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

SERVE = """
import signal, sys
from lightrl import RolloutServer
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell started the tests with &
from tests.helpers.tiny import tiny_prompts
RolloutServer(sys.argv[1], sys.argv[2], group_size=3, max_completion_tokens=12).run(tiny_prompts(6))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    address = f"ipc://{folder}/queue.sock"
    with server("-c", SERVE, str(folder), address):
        yield address


def test_control_c_ends_a_server_without_a_fuss(folder: Path) -> None:
    with server("-c", SERVE, str(folder), "tcp://127.0.0.1:0") as process:
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0


def train(worker: TrainWorker) -> None:
    """Change the weights a good deal, and by another amount each time."""
    worker.optimizer.zero_grad()
    worker.model(torch.tensor([5, 9, 4])).logits.square().mean().backward()
    worker.optimizer.step()


def test_rollouts_are_of_the_weights_that_they_say(folder: Path, address: str) -> None:
    worker = TrainWorker(folder, address, lr=1e-2, prompts_per_step=4, max_staleness=1, reward_fn=len)
    policies, ages = {}, []
    for pulled, batches in enumerate(worker.pull_rollouts()):
        policies.setdefault(worker.steps if pulled else 0, tiny_copy(worker))
        assert len(batches) == 4
        for rollout in (r for b in batches for r in b):
            assert rollout.reward == len(rollout.text)
            ages.append(worker.steps - int(rollout.policy_versions.min()))
            for steps in rollout.policy_versions.unique().tolist():
                right = by_hand(policies[steps], rollout.prompt_ids, rollout.completion_ids)
                of_these = rollout.policy_versions == steps
                assert float((right - rollout.rollout_logprobs)[of_these].abs().max()) < BAR
        if pulled == 4:
            break
        train(worker)
        train(worker)
        policies[worker.steps] = tiny_copy(worker)
        worker.sync_weights()
    assert worker.steps == 8
    assert set(ages) <= {0, 2}  # of this push or the one before
    worker.close()


def tiny_copy(worker: TrainWorker) -> Any:
    copy = tiny_model()
    copy.load_state_dict(worker.model.state_dict())
    return copy.eval()


def test_a_worker_that_never_pushes_is_told(folder: Path, address: str) -> None:
    worker = TrainWorker(folder, address, prompts_per_step=2, max_staleness=1)
    pulls = worker.pull_rollouts()
    batches = [b for _ in range(2) for b in next(pulls)]
    rollouts = [r for b in batches for r in b]
    assert all(r.reward is None for r in rollouts)
    assert any(r.text for r in rollouts), "one may end with its first token"
    with pytest.raises(ValueError, match="none of 3 rollouts has a reward"):
        batches[0].compute_advantages()
    with pytest.raises(RuntimeError, match=r"max_staleness=1: call sync_weights\(\) when a batch is trained on"):
        next(pulls)
    worker.sync_weights()
    assert len(next(worker.pull_rollouts())) == 2  # the worker is as it was
    worker.close()
    assert len(next(worker.pull_rollouts())) == 2  # and comes back
    worker.close()


def test_a_worker_that_nobody_holds_leaves_nothing(folder: Path, address: str) -> None:
    state, threads = torch.get_rng_state(), {t.name for t in threading.enumerate()}
    worker = TrainWorker(folder, address, prompts_per_step=2)
    next(worker.pull_rollouts())
    model = worker.model
    del worker
    gc.collect()
    assert {t.name for t in threading.enumerate()} <= threads
    assert torch.equal(state, torch.get_rng_state())
    assert model(torch.tensor([5, 9])).logits.isfinite().all()


def test_a_worker_of_another_model_is_refused_and_the_server_goes_on(
    folder: Path, address: str, tmp_path: Path
) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    other = TrainWorker(tiny_model(layers=1), address, tokenizer=tmp_path, max_restarts=0)
    with pytest.raises(EngineDiedError, match=r"another model than the server's: model\.layers\.1\.\S+ is missing"):
        next(other.pull_rollouts())
    other.close()
    worker = TrainWorker(folder, address, prompts_per_step=2)
    assert len(next(worker.pull_rollouts())) == 2
    worker.model.model.norm.weight = torch.nn.Parameter(torch.ones(64))
    with pytest.raises(RuntimeError, match=r"model\.norm\.weight is \[64\]"):
        worker.sync_weights()
    worker.close()


def test_an_engine_without_prompts_says_so(folder: Path, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/engine.sock"
    with server("-m", "lightrl.engines.server", "--bind", address):
        worker = TrainWorker(folder, address, max_restarts=0)
        with pytest.raises(RuntimeError, match=r"it has none. A lightrl.RolloutServer has"):
            next(worker.pull_rollouts())
        worker.close()


def test_bad_arguments_of_servers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(secure.TOKEN_VARIABLE, raising=False)
    with pytest.raises(ValueError, match="cannot load 'no/such'"):
        RolloutServer("no/such", "tcp://127.0.0.1:0")
    with pytest.raises(ValueError, match="is no engine address"):
        RolloutServer(folder, "127.0.0.1")
    with pytest.raises(ValueError, match="LIGHTRL_TOKEN is not set"):
        RolloutServer(folder, "tcp://0.0.0.0:5555")
    with pytest.raises(ValueError, match="group_size=0 must be at least 1"):
        RolloutServer(folder, "tcp://127.0.0.1:0", group_size=0)
    with pytest.raises(ValueError, match="leaves no room for a prompt"):
        RolloutServer(folder, "tcp://127.0.0.1:0", max_completion_tokens=128).run(tiny_prompts(2))
    with pytest.raises(ValueError, match="vllm.LLM knows no argument 'gpu_memory'"):
        RolloutServer(folder, "tcp://127.0.0.1:0", gpu_memory=0.5).run(tiny_prompts(2))
    with pytest.raises(ValueError, match="prompt row 0 cannot be sent"):
        RolloutServer(folder, "tcp://127.0.0.1:0", max_completion_tokens=4).run([{"prompt": "w5", "odd": object()}])
    with pytest.raises(ValueError, match="is no engine address"):
        TrainWorker(folder, "localhost")
    with pytest.raises(ValueError, match="has no tokenizer"):
        TrainWorker(tiny_model(), "tcp://127.0.0.1:5555")
