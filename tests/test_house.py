"""House rules that no linter has: short files, short functions, tests that stand where what they test stands."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILE_LINES, FUNCTION_LINES = 300, 60
# Every file of tests that asks for a real engine loads its own, which takes seconds: it may be longer than be split.
ENGINE_TEST_LINES = 550


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
