"""A run's page, in a real browser without a network."""

import json
import math
import random
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from PIL import Image
from torch.utils.tensorboard import SummaryWriter

from lightrl.callbacks import RolloutEvaluation, RolloutLogger, RunReport, ThroughputMonitor
from lightrl.cli.main import main
from lightrl.floors import STAGES
from lightrl.report import read_rollouts, read_run, write_report
from lightrl.report.charts import line_chart, nice_ticks
from tests.helpers.tiny import tiny_prompts
from tests.helpers.training import quiet_trainer, tiny_data, tiny_module

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-headless-shell", "google-chrome"))), None)
NAMES = ("train/loss", "train/entropy", "kl/ref", "kl/mismatch", "rollout/length_mean", "time/generate", "time/reward")
NAMES += ("time/train_step", "time/weight_sync", "time/swap", "floor/generate", "floor/train", "perf/mfu")
NAMES += tuple(f"my/metric_{i}" for i in range(30))
HOSTILE = '</pre><script>console.error("injected")</script>&amp;'


def write_run(folder: Path, steps: int) -> None:
    """A run as TensorBoardLogger and RolloutLogger would leave it."""
    rng = random.Random(0)
    with SummaryWriter(str(folder)) as writer:
        for step in range(steps):
            writer.add_scalar("reward/mean", 1 / (1 + math.exp(4 - 8 * step / steps)) + rng.gauss(0, 0.03), step)
            for i, name in enumerate(NAMES):
                writer.add_scalar(name, rng.gauss(i + 1, 0.2), step)
            parts = [rng.random() for _ in STAGES]
            for stage, part in zip(STAGES, parts, strict=True):
                writer.add_scalar(f"split/{stage}", part / sum(parts), step)
            if step % 10 == 0:
                for k in (1, 4):
                    writer.add_scalar(f"val/pass@{k}", step / steps, step)
    samples = [sample(step, split, i) for step in range(0, steps, 10) for split in ("train", "val") for i in range(8)]
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(s) + "\n" for s in samples))


def sample(step: int, split: str, i: int) -> dict[str, Any]:
    kept = {"step": step, "split": split, "reward": None if i == 7 else i / 6, "terms": '{"right": 1.0}'}
    kept |= {"advantage": 0.0, "tokens": 400, "turns": 1, "truncated": i == 0, "policy_version": step}
    return kept | {"prompt": HOSTILE, "completion": "word " * 600}


def open_page(page: Path, picture: Path) -> str:
    """Open ``page`` where no name resolves, take a picture, and return the document as the browser has it."""
    assert BROWSER is not None
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--hide-scrollbars"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={picture.parent / 'browser'}"]
    options = {"capture_output": True, "text": True, "timeout": 120}
    size = "--window-size=1280,2400"
    shot = subprocess.run([*command, size, f"--screenshot={picture}", page.as_uri()], **options)
    dump = subprocess.run([*command, "--dump-dom", page.as_uri()], **options)
    said = [line for line in (shot.stderr + dump.stderr).splitlines() if "CONSOLE" in line]
    assert not said, said
    return dump.stdout


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_a_thousand_steps_open_in_a_browser_without_a_network(tmp_path: Path) -> None:
    write_run(tmp_path, 1000)
    page = write_report(tmp_path)
    assert page.stat().st_size < 3_000_000
    html = page.read_text()
    assert not re.search(r"""(src|href)\s*=\s*(?!["']?data:)|@import|url\(|fetch\(|https?://(?!www\.w3\.org)""", html)
    document = open_page(page, tmp_path / "page.png")
    assert document.count("<svg") > 40
    assert document.count("<polygon") == len(STAGES)
    assert 100 < document.count("<tr data-split") <= 121
    assert 'class="on"' in document, "the script has run"
    assert HOSTILE not in document
    assert "&lt;script&gt;console.error" in document
    pixels = np.asarray(Image.open(tmp_path / "page.png").convert("RGB")).reshape(-1, 3)
    assert len(np.unique(pixels // 16, axis=0)) > 20, "curves and colours, not an empty page"


def test_a_fit_leaves_a_page_of_its_files(tmp_path: Path) -> None:
    callbacks = [RunReport(every_n_steps=1), RolloutLogger(2), ThroughputMonitor(1e12, 1e10), RolloutEvaluation([1, 2])]
    for logger in (TensorBoardLogger(tmp_path / "tb"), CSVLogger(tmp_path / "csv")):
        trainer = quiet_trainer(max_steps=4, callbacks=callbacks, logger=logger, val_check_interval=2)
        trainer.fit(tiny_module(), tiny_data(val_prompts=tiny_prompts(2)))
        page = Path(logger.log_dir) / "report.html"
        html = page.read_text()
        for title in ("Reward", "Held-out pass@k", "Share of a rollout batch&#x27;s time", "kl/mismatch"):
            assert f"<b>{title}</b>" in html
        assert html.count("<tr data-split") == 16
        assert read_run(Path(logger.log_dir)).scalars["reward/mean"][0] == [0, 1, 2, 3]
        page.unlink()
        SummaryWriter(str(page.parents[1] / "version_7")).close()  # as sampling leaves it
        with SummaryWriter(str(page.parents[1] / "version_8")) as writer:  # as validating leaves it
            writer.add_scalar("val/reward", 1.0, 4)
        assert main(["report", str(tmp_path / ("tb" if "tb" in str(page) else "csv"))]) == 0
        assert page.is_file(), "of the newest run below that trained"


def test_a_run_that_fails_leaves_a_page_of_what_was_until_then(tmp_path: Path) -> None:
    calls = 0

    def reward(completion: str) -> float:
        nonlocal calls
        calls += 1
        if calls > 9:
            raise ConnectionError("the judge is gone")
        return float(calls % 2)

    trainer = quiet_trainer(max_steps=9, callbacks=[RunReport()], logger=CSVLogger(tmp_path))
    with pytest.raises(Exception, match="the judge is gone"):
        trainer.fit(tiny_module(), tiny_data(reward=reward))
    assert "<b>Reward</b>" in (Path(trainer.log_dir) / "report.html").read_text()


@pytest.mark.parametrize("logger", [False, None])
def test_a_run_without_files_is_refused(logger: Any, tmp_path: Path) -> None:
    class Own(CSVLogger):
        pass

    trainer = quiet_trainer(max_steps=1, callbacks=[RunReport()], logger=logger or False)
    with pytest.raises(ValueError, match="RunReport with no logger"):
        trainer.fit(tiny_module(), tiny_data())
    with pytest.raises(ValueError, match="every_n_steps=0"):
        RunReport(every_n_steps=0)


@pytest.mark.parametrize("name", ["nowhere", "empty"])
def test_report_of_no_run_is_one_error(name: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match="2"):
        main(["report", str(tmp_path / name)])
    said = capsys.readouterr().err
    assert {"nowhere": "there is no folder", "empty": "no TensorBoard scalars"}[name] in said


def test_a_line_that_a_killed_run_left_half_is_passed_over(tmp_path: Path) -> None:
    whole = json.dumps(sample(1, "train", 1))
    (tmp_path / "rollouts.jsonl").write_text(f"{whole}\n{whole[:40]}")
    assert len(read_rollouts(tmp_path)) == 1


def test_charts_leave_out_what_is_not_finite_and_thin_what_is_long() -> None:
    chart = line_chart("a < b", {"x": (range(5), [1.0, math.nan, 3.0, math.inf, 2.0])})
    points = re.findall(r'points="([^"]*)"', chart)
    assert [len(p.split()) for p in points] == [3]
    assert "a &lt; b" in chart
    long = line_chart("long", {"x": (range(10_001), [float(i) for i in range(10_001)])})
    (points,) = re.findall(r'points="([^"]*)"', long)
    assert len(points.split()) <= 402
    assert points.split()[-1].startswith("352.0,"), "the last step is there"
    assert line_chart("nothing", {"x": ([0], [math.nan])}) == ""
    assert "<circle" in line_chart("one", {"x": ([3], [0.5])})


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 1.0000001, [0, 0.5, 1]),
        (0.03, 0.97, [0, 0.5, 1]),
        (-3, 12, [-5, 0, 5, 10, 15]),
        (0, 3e-14, [0, 1e-14, 2e-14, 3e-14]),
        (7, 7, [6, 6.5, 7, 7.5, 8]),
    ],
)
def test_ticks_are_round_numbers_around_the_values(low: float, high: float, ticks: list[float]) -> None:
    assert nice_ticks(low, high) == ticks
