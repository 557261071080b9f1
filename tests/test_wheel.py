"""The wheel: what is in it, and that it imports by itself, without packages that are optional."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import lightrl
from lightrl.optional import _INSTALL

ROOT = Path(__file__).parent.parent
DATA = {"lightrl/py.typed", "lightrl/report/page.css", "lightrl/report/page.js"}

PROGRAM = """
import sys
sys.modules |= dict.fromkeys(sys.argv[1:])  # an import of theirs fails
import lightrl, lightrl.callbacks, lightrl.environments, lightrl.report, lightrl.rewards
lightrl.WeightManager, lightrl.RolloutServer, lightrl.TrainWorker, lightrl.parse_vllm_outputs
print(lightrl.__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel"]
    build = [*pip, "--no-deps", "--no-build-isolation", "--no-index", "-w", str(folder), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    assert path.name == f"lightrl_trainer-{lightrl.__version__}-py3-none-any.whl"
    return zipfile.ZipFile(path)


@pytest.mark.slow
def test_it_holds_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    found = {name for name in wheel.namelist() if ".dist-info/" not in name}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "lightrl").rglob("*.py")}
    assert found == sources | DATA


@pytest.mark.slow
def test_it_imports_by_itself_without_optional_packages(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *_INSTALL], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "lightrl" / "__init__.py")
