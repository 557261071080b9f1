"""Reading and writing parameters that FSDP2 has perhaps sharded, without caring whether it has."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lightrl.buffers import aligned, spans
from lightrl.distributed import all_sum

_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # newer torch warns of the latter


def reshard(model: nn.Module) -> None:
    """Have every parameter sharded again: a forward without backward leaves the root's gathered."""
    reshard_all(sharded_modules(model.modules()))


def reshard_all(modules: Iterable[FSDPModule]) -> None:
    """As :func:`reshard`, of modules one by one."""
    for module in modules:
        module.reshard()


def sharded_modules(modules: Iterable[nn.Module]) -> list[FSDPModule]:
    """Return those of ``modules`` that hold shards."""
    return [m for m in modules if isinstance(m, FSDPModule)]


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the whole of a perhaps sharded tensor (on every rank: all must call it together)."""
    if not isinstance(tensor, DTensor):
        return tensor
    sharded: Any = tensor
    if sharded.device.type != sharded.device_mesh.device_type:  # offloaded: collectives work on the mesh's devices
        sharded = sharded.to(sharded.device_mesh.device_type)
    whole: Tensor = sharded.full_tensor()
    return whole


@torch.no_grad()
def full_tensors(tensors: list[Tensor], dtypes: list[torch.dtype]) -> list[Tensor]:
    """As :func:`full_tensor` of each, in the dtype given for it, with one collective for all that FSDP2 has cut."""
    cut = [i for i, t in enumerate(tensors) if isinstance(t, DTensor) and _is_cut(t)]
    found: dict[int, Tensor] = {}
    if cut:
        sharded: list[Any] = [tensors[i] for i in cut]
        found = dict(zip(cut, _gathered(sharded, [dtypes[i] for i in cut]), strict=True))
    return [found[i] if i in found else full_tensor(t).to(dtypes[i]) for i, t in enumerate(tensors)]


def _is_cut(tensor: DTensor) -> bool:
    return tensor.device_mesh.size() > 1 and tensor.placements == (Shard(0),)


def _gathered(tensors: list[DTensor], dtypes: list[torch.dtype]) -> list[Tensor]:
    mesh = tensors[0].device_mesh
    rows = [-(-t.shape[0] // mesh.size()) for t in tensors]  # of the first ranks; the last may have fewer
    sizes = [n * math.prod(t.shape[1:]) * d.itemsize for n, t, d in zip(rows, tensors, dtypes, strict=True)]
    places = spans(sizes)
    total = aligned(places[-1].stop)
    own = torch.empty(total, dtype=torch.uint8, device=mesh.device_type)
    shards = [shard(t).flatten() for t in tensors]
    pieces = zip(places, shards, dtypes, strict=True)
    torch._foreach_copy_([own[p].view(d)[: s.numel()] for p, s, d in pieces], shards)
    everyones = torch.empty(mesh.size() * total, dtype=torch.uint8, device=own.device)
    _all_gather(everyones, own, group=mesh.get_group())
    by_rank = everyones.view(mesh.size(), total)
    return [
        by_rank[:, p].view(d).reshape(-1, *t.shape[1:])[: t.shape[0]]
        for p, d, t in zip(places, dtypes, tensors, strict=True)
    ]


def whole_in_place(tensor: Tensor) -> Tensor | None:
    """Return the memory of a tensor that this rank holds all of, where it is used; None: it has to be gathered."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    mesh = tensor.device_mesh
    if mesh.size() > 1 or tensor.device.type != mesh.device_type:
        return None
    return shard(tensor).detach()  # to_local() would take most of the time of a push


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a perhaps sharded tensor: the same memory, so that it can be written to."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard(tensor: Tensor) -> Tensor:
    """As :func:`local_tensor`, in a hundredth of the time; its graph is not followed."""
    return getattr(tensor, "_local_tensor", tensor)


def with_shard(tensor: Tensor, part: Tensor) -> Tensor:
    """Return ``tensor``, perhaps sharded, with ``part`` as this rank's part, on any device."""
    if not isinstance(tensor, DTensor):
        return part
    make: Any = DTensor
    return make(part, tensor._spec, requires_grad=False)  # type: ignore[no-any-return]


@torch.no_grad()
def total_norm(parameters: Iterable[Tensor]) -> Tensor:
    """Return the norm of all gradients together, over all ranks (a collective)."""
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([shard(g) for g in grads])
    return all_sum(norm.float().square()).sqrt() if any(isinstance(g, DTensor) for g in grads) else norm


@torch.no_grad()
def clip_to_norm(parameters: Iterable[Tensor], limit: float, norm: float) -> None:
    """Scale all gradients down, in place, where their ``norm`` is above ``limit``."""
    grads = [shard(p.grad) for p in parameters if p.grad is not None]
    if norm > limit and grads:
        torch._foreach_mul_(grads, limit / (norm + 1e-6))


@torch.no_grad()
def store_frozen(model: nn.Module, dtype: torch.dtype) -> None:
    """Keep the frozen parameters of ``model`` in ``dtype``: what each forward would round to it anyway."""
    for parameter in model.parameters():
        if not parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


@torch.no_grad()
def write_full(tensor: Tensor, whole: Tensor) -> None:
    """Write ``whole``, which every rank has, into a perhaps sharded tensor."""
    local_tensor(tensor).copy_(local_tensor(sharded_like(tensor, whole)))


def sharded_like(tensor: Tensor, whole: Tensor) -> Tensor:
    """Return ``whole``, which every rank has, sharded as ``tensor`` perhaps is."""
    if not isinstance(tensor, DTensor):
        return whole
    mesh = tensor.device_mesh
    return distribute_tensor(whole.to(mesh.device_type), mesh, tensor.placements, src_data_rank=None)
