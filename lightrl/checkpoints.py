"""Checkpoints that are there whole or not at all: written beside their place, and moved there when they are complete.

Left out: remote file systems, where Lightning's own saving is used.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import socket
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree

from lightrl.distributed import all_objects, rank, world_size
from lightrl.processes import is_alive

METADATA = "meta.pt"
"""File of a distributed checkpoint that holds all but tensors of model and optimizer; Lightning's name."""
_PARTIAL = ".lightrl-{host}-{pid}-{number}.part"  # no name that anybody looks for
_numbers = itertools.count()
_RENAME_EXCHANGE, _AT_FDCWD = 2, -100


class CheckpointWriter:
    """Writes and removes checkpoints in the order asked for; one process a file, several a folder.

    Args:
        background: do it on a thread, from a copy of the state in CPU memory. All ranks make and use a writer together.
    """

    def __init__(self, background: bool = False) -> None:
        self._last: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lightrl-save") if background else None
        # Collectives of another thread would get in between those of training.
        self._group = dist.new_group(backend="gloo") if background and world_size() > 1 else None

    def save(self, checkpoint: dict[str, Any], path: Path) -> None:
        """Write ``checkpoint`` to ``path``, in the background after what was asked for before.

        Raises:
            OSError: it cannot be written; or, in the background, the one before it could not.
        """
        self.wait()
        partial: Path = all_objects(partial_path(path))[0]
        if self._thread is not None:
            checkpoint = _pytree.tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, checkpoint)
        self._do(lambda: self._write(checkpoint, partial, path))

    def remove(self, path: Path) -> None:
        """Remove a checkpoint when the ones that were saved since are whole; where one cannot be written it stays."""
        self._do(lambda: _remove(path))

    def wait(self) -> None:
        """Return when all that was asked for is done (all ranks call it together).

        Raises:
            OSError: a checkpoint could not be written.
        """
        if self._thread is None:
            return
        error = self._last.exception() if self._last is not None else None
        self._last = None
        everywhere = [reason for reason in all_objects(None if error is None else str(error)) if reason]
        if error is not None:
            raise error
        if everywhere:
            raise OSError(everywhere[0])

    def close(self) -> None:
        """End the thread when it has done what was asked for; an error is raised on the rank that has it."""
        if self._thread is None:
            return
        self._thread.shutdown(wait=True)
        if self._last is not None:
            self._last.result()

    def _do(self, work: Callable[[], None]) -> None:
        if self._thread is None:
            work()
        else:
            self._last = self._thread.submit(_after, self._last, work)

    def _write(self, checkpoint: dict[str, Any], partial: Path, path: Path) -> None:
        with whole_or_nothing(path, "the checkpoint", partial):
            if world_size() > 1:
                _write_shards(checkpoint, partial, self._group)
            else:
                torch.save(checkpoint, partial)


def _after(before: Future[None] | None, work: Callable[[], None]) -> None:
    if before is not None:
        before.result()  # where a checkpoint could not be written, those that it was to replace have to stay
    work()


def partial_path(path: Path) -> Path:
    """Return where to write what is to be put at ``path``: beside it, under a name that nobody looks for."""
    name = _PARTIAL.format(host=socket.gethostname(), pid=os.getpid(), number=next(_numbers))
    return path.parent / name


@contextmanager
def whole_or_nothing(path: Path, what: str, partial: Path | None = None) -> Iterator[Path]:
    """Give a path to write a file or a folder to; after the block rank 0 puts it at ``path``, in one step.

    Args:
        path: a file or a folder, perhaps there already.
        what: it is, for errors.
        partial: where to write, where ranks have to agree on it.

    Raises:
        OSError: it could not be written; what was at ``path`` is untouched.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    partial = partial or partial_path(path)
    try:
        if rank() == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            _forget_the_dead(path.parent)
        yield partial
        if rank() == 0:
            _put_in_place(partial, path)
    except (Exception, CheckpointException) as error:  # the latter, strangely, is no Exception
        if rank() == 0:
            _remove(partial)
        free = shutil.disk_usage(path.parent).free / 2**30 if path.parent.exists() else 0.0
        raise OSError(
            f"{what} {path} could not be written, with {free:.2f} GiB free on its disk: {error}. "
            "What was there before is untouched"
        ) from error


def check_checkpoint(path: str | Path) -> None:
    """Refuse a checkpoint that cannot be read; of a remote one nothing is known.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: it is no file that torch saved, nor a folder that several ranks saved, or not all of it.
    """
    if "://" in str(path):
        return
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"the checkpoint {path} is not there")
    parts = [path / ".metadata", path / METADATA]
    if not (zipfile.is_zipfile(path) if path.is_file() else all(part.is_file() for part in parts)):
        raise ValueError(
            f"{path} is no checkpoint, or not all of one: give a file that training saved, or, of several ranks, the "
            "folder"
        )


def read_shards(folder: Path) -> dict[str, Any]:
    """Return the checkpoint that several ranks saved in ``folder``, with whole tensors and no optimizer state."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    known = FileSystemReader(folder).read_metadata().state_dict_metadata
    prefix = "state_dict."
    tensors: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in known.items()
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }
    load(tensors, checkpoint_id=folder, no_dist=True)
    rest: dict[str, Any] = torch.load(folder / METADATA, map_location="cpu", weights_only=True)
    return rest | {"state_dict": {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}}


def _write_shards(checkpoint: dict[str, Any], folder: Path, group: Any) -> None:
    """Write every rank's part of tensors, and on rank 0 the rest, as Lightning's ``ModelParallelStrategy`` does."""
    from torch.distributed.checkpoint.state_dict_saver import save

    rest = dict(checkpoint)
    tensors = {"state_dict": rest.pop("state_dict")}
    tensors |= {f"optimizer_{i}": state for i, state in enumerate(rest.pop("optimizer_states", []))}
    save(tensors, checkpoint_id=folder, process_group=group)
    if rank() == 0:
        torch.save(rest, folder / METADATA)


def _put_in_place(partial: Path, path: Path) -> None:
    files = [f for f in partial.rglob("*") if f.is_file()] if partial.is_dir() else [partial]
    for file in files:  # a name may reach the disk before what it names
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    if path.is_dir() or (path.exists() and partial.is_dir()):
        _exchange(partial, path)
        _remove(partial)
    else:
        os.replace(partial, path)


def _exchange(a: Path, b: Path) -> None:
    """Let two paths change places, in one step where the system can do it."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None or rename(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE):
        aside = a.with_name(f"{a.name}.old")
        os.replace(b, aside)
        os.replace(a, b)
        os.replace(aside, a)


def _forget_the_dead(folder: Path) -> None:
    """Remove what processes of this host that are no more left half-written."""
    for path in folder.glob(_PARTIAL.format(host=socket.gethostname(), pid="*", number="*")):
        pid = path.name.rsplit("-", 2)[1]
        with contextlib.suppress(ValueError):
            if not is_alive(int(pid)):
                _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
