"""Checkpoints are there whole or not at all, whatever happens while they are written."""

import os
import resource
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lightrl import checkpoints
from lightrl.checkpoints import CheckpointWriter


def state(value: float = 0.0) -> dict[str, Any]:
    return {"state_dict": {"w": torch.full((1000,), value)}, "epoch": 3}


def value_of(path: Path) -> float:
    return float(torch.load(path, weights_only=True)["state_dict"]["w"][0])


def test_a_file_is_replaced_whole_and_nothing_else_is_left(tmp_path: Path) -> None:
    writer, path = CheckpointWriter(), tmp_path / "folder" / "last.ckpt"
    writer.save(state(1.0), path)
    writer.save(state(2.0), path)
    assert value_of(path) == 2.0
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("there", ["file", "folder"])
def test_a_folder_takes_the_place_of_what_was_there(there: str, tmp_path: Path) -> None:
    path, new = tmp_path / "last.ckpt", tmp_path / ".new"
    if there == "folder":
        path.mkdir()
        (path / "old").touch()
    else:
        path.touch()
    new.mkdir()
    (new / "part").touch()
    checkpoints._put_in_place(new, path)
    assert [p.name for p in tmp_path.rglob("*")] == ["last.ckpt", "part"]


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    whole, cut, folder = tmp_path / "whole.ckpt", tmp_path / "cut.ckpt", tmp_path / "folder"
    CheckpointWriter().save(state(), whole)
    cut.write_bytes(whole.read_bytes()[:-100])
    (tmp_path / "empty.ckpt").touch()
    folder.mkdir()
    (folder / ".metadata").touch()  # and no part of the rest
    for name in ("cut.ckpt", "empty.ckpt", "folder"):
        with pytest.raises(ValueError, match=f"{name} is no checkpoint, or not all of one"):
            checkpoints.check_checkpoint(tmp_path / name)
    with pytest.raises(FileNotFoundError, match=r"gone.ckpt is not there"):
        checkpoints.check_checkpoint(tmp_path / "gone.ckpt")
    checkpoints.check_checkpoint(whole)
    checkpoints.check_checkpoint("s3://somewhere/last.ckpt")


def test_a_full_disk_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    writer, path = CheckpointWriter(), tmp_path / "last.ckpt"
    writer.save(state(1.0), path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"last.ckpt could not be written, with .* GiB free.*before is untouched"):
            writer.save(state(2.0), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert value_of(path) == 1.0
    assert list(tmp_path.iterdir()) == [path]


def test_what_killed_processes_left_is_removed_and_what_others_write_is_not(tmp_path: Path) -> None:
    name = checkpoints._PARTIAL.format(host=checkpoints.socket.gethostname(), pid="{}", number=0)
    dead, alive = tmp_path / name.format(2**22 + 1), tmp_path / name.format(os.getppid())
    dead.mkdir()
    alive.touch()
    CheckpointWriter().save(state(), tmp_path / "a.ckpt")
    assert sorted(tmp_path.iterdir()) == sorted([alive, tmp_path / "a.ckpt"])


class SlowDisk:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.save, self.fails = threading.Event(), torch.save, False
        monkeypatch.setattr(checkpoints.torch, "save", self)

    def __call__(self, value: Any, path: Path) -> None:
        assert self.go.wait(10)
        if self.fails:
            raise OSError("no space left")
        self.save(value, path)


def test_saving_in_the_background_takes_the_state_of_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, writer, old, new = SlowDisk(monkeypatch), CheckpointWriter(background=True), tmp_path / "1", tmp_path / "2"
    old.touch()
    saved = state(1.0)
    started = time.monotonic()
    writer.save(saved, new)
    writer.remove(old)
    assert time.monotonic() - started < 1
    saved["state_dict"]["w"] += 1
    assert old.exists(), "removed before the new one is whole"
    assert not new.exists()
    disk.go.set()
    writer.wait()
    writer.close()
    assert value_of(new) == 1.0
    assert not old.exists()


def test_an_error_in_the_background_is_raised_at_the_next_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, writer = SlowDisk(monkeypatch), CheckpointWriter(background=True)
    disk.fails = True
    disk.go.set()
    writer.save(state(), tmp_path / "a.ckpt")
    with pytest.raises(OSError, match=r"a.ckpt could not be written.*no space left"):
        writer.save(state(), tmp_path / "b.ckpt")
    writer.close()
    assert not list(tmp_path.iterdir())


def test_nothing_is_removed_for_a_checkpoint_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, writer, old = SlowDisk(monkeypatch), CheckpointWriter(background=True), tmp_path / "old.ckpt"
    old.touch()
    disk.fails = True
    writer.save(state(), tmp_path / "a.ckpt")
    writer.remove(old)
    disk.go.set()
    with pytest.raises(OSError, match=r"a.ckpt could not be written.*no space left"):
        writer.save(state(), tmp_path / "b.ckpt")
    writer.close()
    assert list(tmp_path.iterdir()) == [old]
