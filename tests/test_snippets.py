"""Every block of code in the documentation is run, or checked as far as it can be without a GPU, a hub or a cluster."""

from __future__ import annotations

import importlib
import importlib.util
import io
import os
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch import Trainer

from benchmarks._subprocess import ROOT
from lightrl import RolloutDataModule
from lightrl.cli.main import main
from tests.helpers.processes import free_port
from tests.helpers.programs import server
from tests.helpers.snippets import (
    blocks,
    commands,
    of_page,
    short_data,
    short_fit,
    short_range,
    write_stand_ins,
)

ALLOWED = {
    "python3 -m verl.trainer.main_ppo": "another library's command, to compare with",
    "ray start": "starts a cluster; tests/pools/test_ray.py has a real one",
    "vllm serve": "serves for ever; tests/test_export.py loads such a folder with vLLM",
}
"""Commands that are not checked, by their first words, and why."""
LANGUAGES = {"python", "bash", "yaml", "text", ""}
COMMAND = re.compile(r"^(\$|python|pip|make|lightrl|torchrun|import|from) ", re.MULTILINE)
"""What a block without a language must not hold, for nobody would check it."""
CONFIG = {
    "trainer": {"strategy": "colocated_vllm", "max_steps": 1},
    "model": {"model": "Qwen/Qwen3-0.6B"},
    "data": {"train_prompts": "train.parquet", "reward": "lightrl.rewards.exact_match"},
}
VLLM = re.compile(r"vllm|RolloutServer|TrainWorker", re.IGNORECASE)
RUNS = re.compile(r"\.(fit|validate|predict|as_vllm|generation_mode|pull_rollouts)\(")


def pages(*languages: str) -> list[str]:
    return list(dict.fromkeys(b.page for b in blocks() if b.language in languages))


def python_pages() -> list[Any]:
    def needs_vllm(page: str) -> bool:
        code = "\n".join(b.text for b in of_page(page, "python"))
        return bool(VLLM.search(code) and RUNS.search(code))

    return [pytest.param(p, marks=pytest.mark.vllm if needs_vllm(p) else pytest.mark.slow) for p in pages("python")]


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stand_ins")
    write_stand_ins(folder)
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder


@pytest.fixture
def folder(stand_ins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of a page's own, the present one, where everything lies that pages take for granted."""
    for part in stand_ins.iterdir():
        (tmp_path / part.name).symlink_to(part)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # seeding sets them; put back after the test
        monkeypatch.setenv(name, "0")
    environment = dict(os.environ)
    yield tmp_path
    for name in set(os.environ) - set(environment):
        monkeypatch.delenv(name)
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def write_files(page: str, folder: Path, change: Callable[[str], str] = str) -> None:
    """Write the page's blocks that say which file they are."""
    for block in of_page(page, *LANGUAGES):
        if block.file is not None:
            (folder / block.file).unlink(missing_ok=True)
            (folder / block.file).write_text(change(block.text))


# -- Python -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", python_pages())
def test_python_runs(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks of a page, one after the other, in one namespace; what takes long is made short."""
    monkeypatch.setattr(RolloutDataModule, "__init__", short_data(RolloutDataModule.__init__))
    monkeypatch.setattr(Trainer, "__init__", short_fit(Trainer.__init__))
    port = free_port()

    def here(text: str) -> str:
        return text.replace("127.0.0.1:5555", f"127.0.0.1:{port}")

    write_files(page, folder, here)
    names: dict[str, Any] = {"__name__": "__main__", "range": short_range, "prompts": ["w5 w9"], "answers": ["w5"]}
    names |= excerpted(page)
    with ExitStack() as running:
        for block in of_page(page, "python"):
            if "RolloutServer(" in block.text and block.file is not None:
                running.enter_context(server(block.file, PYTHONPATH=str(ROOT)))
            else:
                exec(compile(here(block.text), f"{page}: {block.text.splitlines()[0]}", "exec"), names)
        names.clear()


def excerpted(page: str) -> dict[str, Any]:
    """Return the names of the program that an example's page shows pieces of."""
    program = (ROOT / page).parent / "run.py"
    if not program.is_file():
        return {}
    module = importlib.import_module(".".join(program.relative_to(ROOT).with_suffix("").parts))
    return {name: value for name, value in vars(module).items() if not name.startswith("__")}


# -- the shell --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", pages("bash"))
def test_commands_exist_and_take_their_options(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(page, folder)
    for block in of_page(page, "bash"):
        assert subprocess.run(["bash", "-n"], input=block.text, text=True, check=False).returncode == 0, block.text
        for words in commands(block.text):
            if allowance(words) is None:
                check(words, folder, monkeypatch)


@pytest.mark.parametrize(
    "line",
    [
        "make nothing",
        "pip install '.[nothing]'",
        "lightrl fit -c config.yaml --model.lrr 1",
        "lightrl plan --generate 8 --device 8",
        "python nowhere.py",
        "python -m lightrl.export a.ckpt folder --dtyp float32",
        "torchrun --nproc-per-host 4 config.yaml",
        "rm -rf folder",
    ],
)
def test_what_is_wrong_is_found(line: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (words,) = commands(line)
    with pytest.raises((AssertionError, pytest.fail.Exception, SystemExit)):
        check(words, folder, monkeypatch)


def allowance(words: list[str]) -> str | None:
    return next((start for start in ALLOWED if words[: len(start.split())] == start.split()), None)


def check(words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, *rest = words
    match program:
        case "lightrl":
            check_lightrl(rest, folder)
        case "python":
            check_python(rest, folder, monkeypatch)
        case "torchrun":
            from torch.distributed.run import get_args_parser

            args = get_args_parser().parse_args(rest)
            assert is_there(args.training_script, folder), words
        case "srun":
            check(rest, folder, monkeypatch)
        case "sbatch":
            assert is_there(rest[-1], folder), words
        case "make":
            targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
            assert {w for w in rest if "=" not in w} <= targets, words
        case "pip":
            check_pip(rest)
        case "export":
            assert all("=" in w for w in rest), words
        case "openssl":
            assert rest == ["rand", "-hex", "32"]
        case _:
            pytest.fail(f"nothing checks {' '.join(words)!r}: teach `check`, or say in ALLOWED why it cannot be")


def is_there(script: str, folder: Path) -> bool:
    return (folder / script).is_file() or (ROOT / script).is_file()


def check_lightrl(words: list[str], folder: Path) -> None:
    if words[0] == "report":
        run = folder / words[1]
        run.mkdir(parents=True, exist_ok=True)
        (run / "metrics.csv").write_text("step,reward/mean\n0,0.5\n")
    print_only = ["--print_config"] if {"-c", "--config"} & set(words) else []
    assert status_of(lambda: main([*words, *print_only])) == 0, words


def check_python(words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if words[0] != "-m":
        assert is_there(words[0], folder), words
        return
    module, *rest = words[1:]
    assert importlib.util.find_spec(module) is not None, words
    options = {w.partition("=")[0] for w in rest if w.startswith("--")}
    if options and module.split(".")[0] in ("lightrl", "examples", "benchmarks"):
        assert options <= options_of(module, monkeypatch), words


def options_of(module: str, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return what the help of one of our programs names."""
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    with redirect_stdout(io.StringIO()) as said:
        assert status_of(lambda: runpy.run_module(module, run_name="__main__")) == 0
    return set(re.findall(r"--[\w-]+", said.getvalue()))


def check_pip(words: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (target,) = [w for w in words[1:] if not w.startswith("-")]
    name, _, extras = target.partition("[")
    assert words[0] == "install", words
    assert name in (".", project["name"]), words
    assert set(filter(None, extras.rstrip("]").split(","))) <= set(project["optional-dependencies"]), words


def status_of(run: Callable[[], Any]) -> int:
    try:
        result = run()
    except SystemExit as end:
        return int(end.code or 0)
    return result if isinstance(result, int) else 0


# -- YAML -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", pages("yaml"))
def test_config_files_are_what_the_command_line_takes(page: str, folder: Path) -> None:
    (folder / "base.yaml").write_text(yaml.safe_dump(CONFIG))
    write_files(page, folder)
    for block in of_page(page, "yaml"):
        (folder / "block.yaml").write_text(block.text)
        read = ["fit", "-c", "base.yaml", "-c", "block.yaml", "--print_config"]
        assert status_of(lambda: main(read)) == 0, block.text  # noqa: B023


# -- nothing is left out ----------------------------------------------------------------------------------------------


def test_every_block_is_of_a_language_that_is_checked() -> None:
    unknown = [b for b in blocks() if b.language not in LANGUAGES or (not b.language and COMMAND.search(b.text))]
    assert not unknown, [(b.page, b.language, b.text[:60]) for b in unknown]


def test_what_is_allowed_is_still_there() -> None:
    used = {allowance(words) for b in blocks() if b.language == "bash" for words in commands(b.text)}
    assert set(ALLOWED) <= used, f"no longer in the documentation: {set(ALLOWED) - used}"
