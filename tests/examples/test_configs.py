"""The shipped config files, run from the command line as they are, and short."""

from pathlib import Path
from typing import Any

import pytest
import yaml

import examples
from examples.calculator import prepare
from examples.tiny.task import write_task
from lightrl.cli.main import main

FOLDER = Path(examples.__file__).parent
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/config.yaml"))
HF = ["--trainer.strategy", "colocated_hf"]
SHORT = ["--trainer.max_steps", "1", "--trainer.limit_val_batches", "1", "--trainer.val_check_interval", "1"]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where the examples' models and data lie where the config files look for them."""
    folder = tmp_path_factory.mktemp("project")
    write_task(folder / "runs/tiny")
    prepare.main(["--out", str(folder / "runs/calculator"), "--warm-up-steps", "2"])
    return folder


@pytest.fixture(autouse=True)
def in_project(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # seeding sets them; put back after the test
        monkeypatch.setenv(name, "0")


def fit(name: str, *options: str) -> None:
    assert main(["fit", "-c", str(FOLDER / name / "config.yaml"), *options]) == 0


def test_every_example_ships_one() -> None:
    assert sorted(path.parent.name for path in FOLDER.glob("*/run.py")) == NAMES


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_each_runs_dry_and_short(name: str, project: Path) -> None:
    fit(name, *HF, "--trainer.fast_dev_run", "true")
    assert not list((project / "runs" / name).glob("version_*"))
    fit(name, *HF, *SHORT)
    (run,) = (project / "runs" / name).glob("version_*")
    assert (run / "report.html").stat().st_size > 10_000
    assert (run / "rollouts.jsonl").is_file()
    kept = yaml.safe_load((run / "config.yaml").read_text())
    assert kept["trainer"]["strategy"] == "colocated_hf"
    assert main(["fit", "-c", str(run / "config.yaml"), "--trainer.fast_dev_run", "true"]) == 0, "as it was saved"


@pytest.mark.vllm
def test_one_runs_as_it_is_with_vllm(project: Path, capsys: Any) -> None:
    fit("tiny", *SHORT, "--trainer.logger.save_dir", "runs/vllm")
    (run,) = (project / "runs/vllm").glob("version_*")
    (checkpoint,) = run.rglob("last.ckpt")
    options = ["-c", str(FOLDER / "tiny/config.yaml"), "--ckpt_path", str(checkpoint)]
    assert main(["sample", *options, "--data.val_batch_size", "8", "--trainer.limit_predict_batches", "1"]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith("8 completions, mean reward ")
    assert said.endswith(": rollouts.jsonl")
