"""Sharded tensors made whole together, on three ranks that they do not divide by."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from benchmarks._subprocess import ROOT
from lightrl.sharding import full_tensors

RANKS = 3
SHAPES = [(7,), (3, 5), (1, 4), (8, 2, 3), (2,)]
"""Rows for each rank alike, fewer for the last, none for it."""
KINDS = [torch.float32, torch.bfloat16]


def tensors() -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=random) for shape in SHAPES]


def main(rank: str, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    plain = tensors()
    whole = [plain[0], distribute_tensor(plain[1], mesh, [Replicate()])]  # neither is cut
    given = [*whole, *(distribute_tensor(t, mesh, [Shard(0)]) for t in plain)]
    for first in (0, 1):
        wanted = [KINDS[(i + first) % 2] for i in range(len(given))]
        found = full_tensors(given, wanted)
        for tensor, right, kind in zip(found, [*plain[:2], *plain], wanted, strict=True):
            assert torch.equal(tensor, right.to(kind)), (right.shape, kind)
            assert tensor.dtype == kind
    assert not full_tensors([], [])
    dist.destroy_process_group()


@pytest.mark.slow
def test_tensors_of_any_shape_and_dtype_are_made_whole_together(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.test_sharding"]
    ranks = [subprocess.Popen([*command, str(r), str(tmp_path / "store")], cwd=ROOT) for r in range(RANKS)]
    assert [process.wait(120) for process in ranks] == [0] * RANKS


if __name__ == "__main__":
    main(*sys.argv[1:])
