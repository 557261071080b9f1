"""The documentation: it builds strictly, without a network, and its picture is what its text says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from benchmarks._subprocess import ROOT


def nav_pages() -> list[str]:
    class Loader(yaml.SafeLoader):
        pass

    Loader.add_multi_constructor("tag:yaml.org,2002:python/name:", lambda *_: None)

    def pages(entry: object) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        inside = entry.values() if isinstance(entry, dict) else entry
        return [page for part in inside for page in pages(part)]  # type: ignore[attr-defined]

    return pages(yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"])


@pytest.mark.slow
def test_every_page_is_built_without_a_warning(tmp_path: Path) -> None:
    # A proxy where nobody listens: what asks the network for anything fails.
    nowhere = dict.fromkeys(["http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"], "http://127.0.0.1:9")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | nowhere, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    built = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.html")}
    assert {page.removesuffix(".md") + ".html" for page in nav_pages()} <= built
    page = (tmp_path / "api/strategies.html").read_text()
    assert 'id="lightrl.strategies.AsyncVLLMStrategy"' in page
    assert 'href="#lightrl.strategies.RolloutStrategy"' in page, "cross-references of docstrings are links"
    assert ":class:" not in page
    outside = "https://fonts.", "//cdn.", "//unpkg.com"
    assert not [address for address in outside if address in (tmp_path / "index.html").read_text()]


def test_the_picture_is_what_its_text_says(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "scripts/data_flow.py", str(tmp_path / "fresh.svg")], cwd=ROOT, check=True)
    assert (tmp_path / "fresh.svg").read_text() == (ROOT / "docs/data_flow.svg").read_text(), (
        "run: python scripts/data_flow.py"
    )
