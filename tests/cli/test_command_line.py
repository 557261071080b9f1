"""What is typed, and what comes of it: every command through real runs, and each mistake as one clear error."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from lightrl.cli.main import main
from lightrl.cli.training import CommandLine, summary
from lightrl.corrections import TruncatedToken
from tests.conftest import distributed_environment
from tests.helpers.tiny import save_tiny, tiny_prompts


def saving(folder: str) -> dict[str, Any]:
    arguments = {"dirpath": folder, "filename": "end", "every_n_train_steps": 2}
    return {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": arguments}


CONFIG: dict[str, Any] = {
    "seed_everything": 0,
    "trainer": {
        "strategy": "colocated_hf",
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": 2,
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "logger": {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "logs", "name": ""}},
        "callbacks": [
            saving("checkpoints"),
            {"class_path": "lightrl.callbacks.RolloutLogger"},
        ],
    },
    "model": {"model": "model", "lr": 0.05},
    "data": {
        "train_prompts": "prompts.jsonl",
        "val_prompts": "prompts.jsonl",
        "reward": "tests.helpers.fits:share_of_even_words",
        "group_size": 3,
        "prompts_per_step": 4,
        "max_completion_tokens": 6,
        "deterministic": True,
    },
}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeding sets these for the processes that a run starts; put back after the test."""
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "0")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, prompts and a config file, which is the present one."""
    save_tiny(tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in tiny_prompts(8)))
    write_config(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_config(folder: Path, name: str = "config.yaml", **changes: Any) -> None:
    """Write a config file with ``section__key=value`` changed."""
    config = json.loads(json.dumps(CONFIG))
    for place, value in changes.items():
        section, _, key = place.partition("__")
        config[section][key] = value
    (folder / name).write_text(yaml.safe_dump(config, sort_keys=False))


def sampled(path: Path) -> list[tuple[str, str]]:
    return [(r["prompt"], r["completion"]) for r in map(json.loads, path.read_text().splitlines())]


# -- real runs --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_checkpoint_is_read_alike_as_a_file_and_as_a_folder(project: Path, capsys: Any) -> None:
    assert main(["fit", "-c", "config.yaml"]) == 0
    (checkpoint,) = (project / "checkpoints").iterdir()
    assert checkpoint.is_file()
    assert (project / "logs/version_0/rollouts.jsonl").is_file()
    kept = yaml.safe_load((project / "logs/version_0/config.yaml").read_text())
    assert kept["data"]["reward"] == CONFIG["data"]["reward"], "what the run leaves can be run again"

    write_config(project, "two.yaml", trainer__devices=2, trainer__logger=False, trainer__callbacks=[saving("shards")])
    in_a_shell("fit", "-c", "two.yaml", folder=project)
    (shards,) = (project / "shards").iterdir()
    assert shards.is_dir(), "two ranks save a folder"

    write_config(project, trainer__logger=False, trainer__callbacks=[])
    for name, path in {"file": checkpoint, "folder": shards, "none": None}.items():
        loaded = [] if path is None else ["--ckpt_path", str(path)]
        assert main(["sample", "-c", "config.yaml", *loaded, "--out", f"{name}.jsonl"]) == 0
    assert re.search(r"8 completions, mean reward [0-9.]+: folder.jsonl", capsys.readouterr().out)
    found = {name: sampled(project / f"{name}.jsonl") for name in ("file", "folder", "none")}
    assert sorted(prompt for prompt, _ in found["file"]) == sorted(p["prompt"] for p in tiny_prompts(8))
    assert found["file"] == found["folder"] != found["none"]

    rewards = []
    for path in (checkpoint, shards):
        assert main(["validate", "-c", "config.yaml", "--ckpt_path", str(path)]) == 0
        rewards.append(next(line for line in capsys.readouterr().out.splitlines() if "val/reward" in line))
    assert rewards[0] == rewards[1]


@pytest.mark.slow
def test_what_is_typed_holds_over_what_a_checkpoint_was_trained_with(project: Path) -> None:
    """A correction too, which a checkpoint does not hold."""
    correction = {"class_path": "lightrl.corrections.TruncatedToken", "init_args": {"cap": 3.0}}
    write_config(project, trainer__logger=False, model__correction=correction)
    assert main(["fit", "-c", "config.yaml"]) == 0
    resumed = ["--ckpt_path", "checkpoints/end.ckpt", "--model.lr", "0.001", "--trainer.max_steps", "3"]
    line = CommandLine("fit", ["fit", "-c", "config.yaml", *resumed])
    assert (line.model.lr, line.model.correction) == (0.001, TruncatedToken(3.0))


def in_a_shell(*arguments: str, folder: Path) -> None:
    path = os.pathsep.join([str(Path(__file__).resolve().parents[2]), str(folder)])
    env = {name: value for name, value in os.environ.items() if name not in distributed_environment()}
    command = [sys.executable, "-m", "lightrl", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env | {"PYTHONPATH": path})
    assert done.returncode == 0, done.stdout + done.stderr


def test_predict_and_sample_to_parquet(project: Path, capsys: Any) -> None:
    write_config(project, trainer__logger=False, trainer__callbacks=[], trainer__enable_checkpointing=False)
    assert main(["predict", "-c", "config.yaml"]) == 0
    assert re.search(r"^8 completions, mean reward [0-9.]+$", capsys.readouterr().out, re.MULTILINE)
    assert main(["sample", "-c", "config.yaml", "--data.val_group_size", "2", "--out", "deep/rollouts.parquet"]) == 0
    table = pq.read_table(project / "deep/rollouts.parquet")
    assert table.num_rows == 16
    assert {"prompt", "completion", "reward", "tokens"} <= set(table.column_names)
    assert not {"advantage", "policy_version"} & set(table.column_names), "of what is trained on alone"


def test_a_summary_counts_what_was_scored() -> None:
    assert summary([1.0, 0.0, None]) == "3 completions, mean reward 0.5 (2 scored)"
    assert summary([1.0, 0.0]) == "2 completions, mean reward 0.5"
    assert summary([None]) == "1 completions, none scored"
    assert summary([]) == "0 completions, none scored"


@pytest.mark.slow
def test_from_a_shell(project: Path) -> None:
    in_a_shell("fit", "-c", "config.yaml", "--trainer.fast_dev_run", "true", folder=project)
    assert not (project / "logs").exists()
    assert not (project / "rollouts.jsonl").exists(), "a dry run leaves nothing"


# -- mistakes ---------------------------------------------------------------------------------------------------------


def refused(capsys: Any, *arguments: str) -> str:
    """What is said on standard error; the exit status must be 2."""
    with pytest.raises(SystemExit) as exit_:
        main(list(arguments))
    assert exit_.value.code == 2
    said: str = capsys.readouterr().err
    return "\n".join(line for line in said.splitlines() if not line.startswith("Seed set"))


def test_an_unknown_command_suggests_the_nearest(capsys: Any) -> None:
    assert main(["smaple"]) == 2
    assert "no command 'smaple'; did you mean 'sample'?" in capsys.readouterr().err


def test_help_names_every_command(capsys: Any) -> None:
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(f"lightrl {name} " in said for name in ("fit", "validate", "predict", "sample", "report", "plan"))
    assert max(map(len, said.splitlines())) <= 104


CALLBACK = "lightrl.callbacks.KLMonitor"


@pytest.mark.parametrize(
    ("changes", "key", "meant"),
    [
        ({"trainer__max_stepss": 3}, "trainer.max_stepss", "trainer.max_steps"),
        ({"model__lrr": 3}, "model.lrr", "model.lr"),
        ({"data__rewards": "x"}, "data.rewards", "data.reward"),
        ({"data__lr": 1e-3}, "data.lr", "model.lr"),
        (
            {"trainer__callbacks": [{"class_path": CALLBACK, "init_args": {"stop_abov": 1}}]},
            "trainer.callbacks[0].init_args.stop_abov",
            "trainer.callbacks[0].init_args.stop_above",
        ),
        (
            {"trainer__callbacks": [{"class_path": CALLBACK, "init_arg": {}}]},
            "trainer.callbacks[0].init_arg",
            "trainer.callbacks[0].init_args",
        ),
        (
            {"trainer__callbacks": [{"class_path": "lightrl.callbacks.KLMonitr"}]},
            "lightrl.callbacks.KLMonitr",
            CALLBACK,
        ),
        (
            {"trainer__strategy": {"class_path": "lightrl.strategies.AsyncVLLMStrategy", "init_args": {"stale": 1}}},
            "trainer.strategy.init_args.stale",
            None,
        ),
    ],
)
def test_an_unknown_key_suggests_the_nearest(
    project: Path, capsys: Any, changes: dict[str, Any], key: str, meant: str | None
) -> None:
    write_config(project, **changes)
    said = refused(capsys, "fit", "-c", "config.yaml")
    assert said.startswith(f"lightrl fit: error: no key {key!r} in config.yaml")
    assert meant is None or said.endswith(f"; did you mean {meant!r}?")
    assert len(said.splitlines()) == 1


def test_a_class_of_its_own_is_looked_into(project: Path, capsys: Any) -> None:
    config = yaml.safe_load((project / "config.yaml").read_text())
    config["model"] = {"class_path": "lightrl.algorithms.PPO", "init_args": {"model": "model", "critik": "shared"}}
    config["trianer"] = {}
    (project / "config.yaml").write_text(yaml.safe_dump(config))
    said = refused(capsys, "fit", "-c", "config.yaml").splitlines()
    assert len(said) == 2, "every unknown key, a line each"
    assert "no key 'model.init_args.critik' in config.yaml; did you mean 'model.init_args.critic'?" in said[0]
    assert "no key 'trianer' in config.yaml; did you mean 'trainer'?" in said[1]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--trainr.max_steps=3", "no option 'trainr.max_steps'; did you mean 'trainer.max_steps'?"),
        ("--trainer.max_stps=3", "no option 'trainer.max_stps'; did you mean 'trainer.max_steps'?"),
        ("--model.lrr=3", "no option 'model.lrr'; did you mean 'model.lr'?"),
        ("--model.l=3", "no option 'model.l'; did you mean 'model.lr'?"),
        ("--model.learning_rate=3", "no option 'model.learning_rate'; did you mean 'model.lr'?"),
        ("--ckpt_path=gone.ckpt", "ckpt_path='gone.ckpt' is not there"),
        ("--ckpt_path=", "ckpt_path='' is not there"),
        ("--ckpt_path=best", "ckpt_path='best' is not there"),
        ("--ckpt_path=config.yaml", "config.yaml is no checkpoint, or not all of one"),
        ("--model.init_args.model=./no/model", "cannot load './no/model': there is no such folder"),
        ("--data.group_size=2.5", "group_size"),
        ("--model.lr=-3", "lr=-3.0 must be a finite number, 0 or more"),
        ("--trainer.max_steps=x", "trainer.max_steps"),
        ("--data.reward=nowhere", "reward 'nowhere' is no import path"),
        ("--data.group_size=0", "group_size=0 must be at least 1"),
    ],
)
def test_a_wrong_option_is_one_error(project: Path, capsys: Any, option: str, message: str) -> None:
    said = refused(capsys, "fit", "-c", "config.yaml", option)
    assert said.startswith("lightrl fit: error: ")
    assert message in said
    assert len(said.splitlines()) <= 2


def test_without_any_option_the_error_names_what_is_needed(project: Path, capsys: Any) -> None:
    assert "train_prompts" in refused(capsys, "fit")


def test_an_unknown_strategy_is_answered_with_those_that_sample(project: Path, capsys: Any) -> None:
    said = refused(capsys, "fit", "-c", "config.yaml", "--trainer.strategy", "colocated_vlm")
    assert "strategy='colocated_vlm'" in said
    assert "'colocated_vllm', 'async_vllm' and 'colocated_hf'" in said


def test_a_config_file_that_is_not_there(project: Path, capsys: Any) -> None:
    assert "nowhere.yaml" in refused(capsys, "fit", "-c", "nowhere.yaml")


def test_a_config_file_that_is_no_yaml(project: Path, capsys: Any) -> None:
    (project / "config.yaml").write_text("trainer: [1\nmodel: {")
    assert refused(capsys, "fit", "-c", "config.yaml").startswith("lightrl fit: error: ")


@pytest.mark.parametrize(("out", "message"), [("rollouts.csv", "must end in"), ("config.jsonl", "exists already")])
def test_sample_refuses_before_it_samples(project: Path, capsys: Any, out: str, message: str) -> None:
    (project / "config.jsonl").write_text("mine")
    write_config(project, trainer__logger=False, trainer__callbacks=[])
    assert message in refused(capsys, "sample", "-c", "config.yaml", "--out", out)
    assert (project / "config.jsonl").read_text() == "mine"
