"""Checkpoints of two ranks: saved in the background, and gone on from by one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks._subprocess import ROOT
from lightrl import RLModule
from lightrl.rollout_state import deal_anew, deal_sums_anew
from tests.helpers.resumable import Noisy, read_trace
from tests.helpers.tiny import tiny_model

STEP = 3
"""The second of the two that a rollout batch is used for."""


def run(folder: Path, kind: str, place: str, ranks: int, resume: str = "") -> tuple[int, str]:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tests.test_other_ranks", str(folder), kind, place, str(ranks), resume]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


def main(folder: str, kind: str, place: str, ranks: str, resume: str) -> None:
    from tests.faults import Fault
    from tests.helpers.resumable import train

    moment, phase = place.split() if place else ("", "")
    fault = Fault(kind, phase, moment, STEP) if place else None
    train(folder, fault, "colocated_hf", int(ranks), resume or None, save_in_background=kind == "background")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_checkpoint_is_loaded_and_gone_on_from_by_one(tmp_path: Path) -> None:
    right, folder = tmp_path / "right", tmp_path / "run"
    code, said = run(right, "background", "", 2)
    assert code == 0, said
    assert (right / "last.ckpt").is_dir()
    loaded = Noisy.load_from_checkpoint(right / "last.ckpt", model=tiny_model())
    for name, weight in torch.load(right / "end.0")["weights"].items():
        assert torch.equal(loaded.policy.get_parameter(name), weight)
    assert run(folder, "kill", "before micro_batch", 2)[0] != 0
    code, said = run(folder, "none", "", 1, "last")
    assert code == 0, said
    assert "its groups are dealt out anew" in said
    assert "is of 2 ranks and the run has 1" in said
    assert (folder / "last.ckpt").is_file()

    def prompts(of: Path, ranks: int, steps: range) -> list[list[int]]:
        traces = [read_trace(of, r)[0] for r in range(ranks)]
        found = [t[str({"step": s})][0] for t in traces for s in steps]
        return sorted({tuple(prompt) for rollouts in found for prompt, _ in rollouts})  # type: ignore[arg-type]

    later = range(STEP + 1, 6)
    assert prompts(folder, 1, later) == prompts(right, 2, later)


def test_groups_and_sums_are_dealt_anew() -> None:
    states = [{"policy_version": 4, "groups": ["a", "b"]}, None, {"policy_version": 4, "groups": ["c"]}]
    assert deal_anew(states, 2) == [  # type: ignore[arg-type]
        {"policy_version": 4, "groups": ["a", "c"]},
        {"policy_version": 4, "groups": ["b"]},
    ]
    assert deal_anew([None, None], 1) == [None]
    assert deal_sums_anew([{"x": (1.0, 2.0)}, {"x": (3.0, 4.0)}], 3) == [{"x": (4.0, 6.0)}, *[{"x": (0.0, 0.0)}] * 2]


def test_a_folder_of_shards_needs_no_process_group(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    from lightrl.checkpoints import METADATA

    module = RLModule(tiny_model(seed=3))
    module.configure_model()
    save({"state_dict": module.state_dict()}, checkpoint_id=tmp_path / "a.ckpt", no_dist=True)
    rest = {"hyper_parameters": dict(module.hparams), "pytorch-lightning_version": "2.6.0"}
    torch.save(rest, tmp_path / "a.ckpt" / METADATA)
    loaded = RLModule.load_from_checkpoint(tmp_path / "a.ckpt", model=tiny_model())
    for name, weight in tiny_model(seed=3).named_parameters():
        assert torch.equal(loaded.policy.get_parameter(name), weight)


if __name__ == "__main__":
    main(*sys.argv[1:])
