"""Packages that lightrl works without: one error where they are missing, which names an extra that there is."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

from lightrl import optional

EXTRAS = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"][
    "optional-dependencies"
]


@pytest.mark.parametrize("package", optional._INSTALL)
def test_a_missing_package_is_named_with_what_to_install(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    for ask in (optional.import_optional, optional.require_optional):
        with pytest.raises(ValueError, match=rf"^lora=8 needs {package}, which is not installed here: ") as error:
            ask(package, "lora=8")
        for extra in re.findall(r"lightrl-trainer\[(\w+)\]", str(error.value)):
            assert any(requirement.startswith(package.replace("_", "-")) for requirement in EXTRAS[extra])


def test_what_is_there_is_imported() -> None:
    optional.require_optional("datasets", "a test")
    assert optional.import_optional("datasets.features", "a test").Value("int64").dtype == "int64"
