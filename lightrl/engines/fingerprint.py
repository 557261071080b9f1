"""Does an engine hold the weights it was sent? Answered tensor by tensor, on whatever layout the engine made of them.

A matrix is compared by how it answers a few fixed random vectors, since engines fuse, shard and repack their matrices;
a vector is compared bit by bit. That notices a change of one optimizer step, which a check on logprobs would not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_PROBES = 2
_CONV1D = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@dataclass(slots=True)
class _Expected:
    name: str
    module: nn.Module
    leaf: str
    rows: slice
    answer: Tensor
    exact: bool


class Fingerprint:
    """Taken of weights while they stream into an engine, compared afterwards with what the engine made of them.

    Args:
        model: the engine's module on this rank.
        tp_rank: this rank's place in its tensor-parallel group.
    """

    def __init__(self, model: nn.Module, tp_rank: int) -> None:
        self._model, self._tp_rank = model, tp_rank
        self._expected: list[_Expected] = []

    def watch(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Pass (checkpoint name, full tensor) pairs on, keeping a fingerprint of each that the engine holds plainly."""
        for name, tensor in weights:
            place = _locate(self._model, name)
            if place is not None:
                # GPT-2's checkpoints hold these transposed, and vLLM turns them while it loads.
                turned = name.endswith(_CONV1D) and type(self._model).__name__.startswith("GPT2")
                self._expect(name, tensor.T if turned else tensor, *place)
            yield name, tensor

    def _expect(self, name: str, tensor: Tensor, module: nn.Module, leaf: str, part: int) -> None:
        local, rows = _local(tensor, module, part, self._tp_rank)
        if not local.numel():
            return  # a small vocabulary may lie on other ranks altogether
        is_matrix = leaf == "weight" and local.ndim == 2
        # In the engine's dtype: float() keeps every bit, so that what is no matrix can be compared exactly.
        plain = local.detach().to(getattr(module, leaf).dtype).float().clone()
        answer = _answer(module, local) if is_matrix else plain
        self._expected.append(_Expected(name, module, leaf, rows, answer, exact=not is_matrix))

    def mismatches(self) -> list[str]:
        """Return the names of the tensors that the engine does not hold as they were sent."""
        wrong = []
        for e in self._expected:
            held = _held(e)
            scale = float(e.answer.abs().max()) or 1.0
            tolerance = 0.0 if e.exact else _TOLERANCE.get(_dtype(e.module), 2e-2)
            if held.shape != e.answer.shape or not float((held - e.answer).abs().max()) <= tolerance * scale:
                wrong.append(e.name)
        return wrong + self._stale_tied_heads(wrong)

    def _stale_tied_heads(self, wrong: list[str]) -> list[str]:
        head: Any = getattr(self._model, "lm_head", None)
        sent = {e.name for e in self._expected}
        tied = next((e for e in self._expected if _is_embedding(e.module)), None)
        if tied is None or tied.name in wrong or "lm_head.weight" in sent:
            return []
        if head is tied.module or not hasattr(head, "quant_method"):
            return []
        rows = tied.module.weight[tied.rows].detach()  # type: ignore[index]
        probe = _probe(rows.shape[1], rows.device, rows.dtype)
        held, right = head.quant_method.apply(head, probe).float()[:, tied.rows], (probe @ rows.T).float()
        tolerance = _TOLERANCE.get(rows.dtype, 2e-2) * float(right.abs().max())
        return [] if float((held - right).abs().max()) <= tolerance else [f"lm_head.weight (tied to {tied.name})"]


def _locate(model: nn.Module, name: str) -> tuple[nn.Module, str, int] | None:
    path, _, leaf = name.rpartition(".")
    parent, _, last = path.rpartition(".")
    candidates = [(path, -1)]
    for fused, parts in (getattr(model, "packed_modules_mapping", None) or {}).items():
        if last in parts:
            candidates.insert(0, (f"{parent}.{fused}", list(parts).index(last)))
    for candidate, part in candidates:
        try:
            module = model.get_submodule(candidate)
        except AttributeError:
            continue
        if isinstance(getattr(module, leaf, None), Tensor):
            return module, leaf, part
    return None


def _local(tensor: Tensor, module: nn.Module, part: int, tp_rank: int) -> tuple[Tensor, slice]:
    """Return the slice of a full tensor that this rank's module holds, and its rows in the module's own tensor."""
    kinds = {c.__name__ for c in type(module).__mro__}
    if "RowParallelLinear" in kinds:
        width = int(module.input_size_per_partition)  # type: ignore[arg-type]
        return (tensor[:, tp_rank * width :][:, :width] if tensor.ndim == 2 else tensor), slice(None)
    if "VocabParallelEmbedding" in kinds:
        shard: Any = module.shard_indices
        local = tensor[shard.org_vocab_start_index : shard.org_vocab_end_index]
        return local, slice(0, len(local))
    if "ColumnParallelLinear" in kinds:
        sizes: Any = module.output_partition_sizes
        part = max(part, 0)
        size, offset = sizes[part], sum(sizes[:part])
        shards = tensor.shape[0] // size  # fewer than ranks where key heads are replicated
        tp_size = int(getattr(module, "tp_size", 1))
        index = tp_rank // max(1, tp_size // shards)
        return tensor[index * size : (index + 1) * size], slice(offset, offset + size)
    return tensor, slice(None)


def _is_embedding(module: nn.Module) -> bool:
    return type(module).__name__ == "VocabParallelEmbedding"


def _probe(width: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(width)
    return torch.randn(_PROBES, width, generator=generator).to(device, dtype)


def _dtype(module: nn.Module) -> torch.dtype:
    return next(p.dtype for p in module.parameters(recurse=False))


def _answer(module: nn.Module, local: Tensor) -> Tensor:
    if _is_embedding(module):
        return _probe(local.shape[0], local.device, torch.float32) @ local.float()
    return (_probe(local.shape[1], local.device, local.dtype) @ local.T).float()


def _held(e: _Expected) -> Tensor:
    tensor: Tensor = getattr(e.module, e.leaf).detach()
    if e.exact:
        return tensor[e.rows].float()
    if _is_embedding(e.module):
        rows = tensor[e.rows].float()
        return _probe(rows.shape[0], rows.device, torch.float32) @ rows
    width = getattr(e.module, "input_size_per_partition", None) or getattr(e.module, "embedding_dim", None)
    probe = _probe(int(width or tensor.shape[-1]), tensor.device, _dtype(e.module))
    quant: Any = getattr(e.module, "quant_method", None)
    out = quant.apply(e.module, probe) if quant is not None else probe @ tensor.T
    return out.float()[:, e.rows]
