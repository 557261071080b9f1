"""Where each tensor of a policy lies in an engine, found once; from then on a push is one copy of all of them.

vLLM's own loaders say where: they are run on tensors without storage while every copy they ask for is written down and
not made. What they do besides copying has no place in a plan, and then there is none.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightrl.engines.base import WeightSyncError, not_as_sent
from lightrl.weights.source import in_chunks

_WINDOW = 64
_PLAIN = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A strided part of one tensor, in elements, and its place in the engine."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    place: Tensor


class CopyPlan:
    """What goes where in an engine whose layout is plain: dense, unquantised, every value a copy of one sent.

    The engine's parameters keep their addresses for its whole life, also over sleep and wake: a plan stays good.

    Args:
        pieces: by checkpoint name.
    """

    def __init__(self, pieces: dict[str, list[_Piece]]) -> None:
        self._pieces = pieces

    @classmethod
    def record(cls, model: Any, outline: list[tuple[str, Tensor]]) -> CopyPlan | None:
        """Return the plan for an engine's module, or None where its layout is not plain.

        Args:
            model: the module, which ``load_weights`` can fill; it is not written to.
            outline: checkpoint name and a tensor without storage for all that will be sent.
        """
        if not _is_plain(model):
            return None
        recorder = _Recorder()
        recorder.names = {tensor.untyped_storage()._cdata: name for name, tensor in outline}
        try:
            with torch.no_grad(), recorder:
                model.load_weights(iter(outline))
        except Exception as error:  # loaders fail in many ways on what they cannot take as it is; reloading can
            log.debug("no plan for pushes: %s: %s", type(error).__name__, error)
            return None
        everything = all(name in recorder.pieces for name, _ in outline)
        return cls(recorder.pieces) if everything and recorder.fills(model) else None

    def bind(self, weights: list[tuple[str, Tensor]]) -> Copies:
        """Return the copies of all (checkpoint name, full tensor) pairs into the engine.

        Raises:
            WeightSyncError: a name has no place in the plan, or one of the plan's is missing.
        """
        self._check({name for name, _ in weights})
        return self._copies(weights)

    def copy(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy all (checkpoint name, full tensor) pairs, few at a time, since they may be made one by one.

        Raises:
            WeightSyncError: one has no place, did not arrive, or is missing.
        """
        sent: set[str] = set()
        for chunk in in_chunks(weights, lambda tensor: tensor.nbytes):
            sent |= {name for name, _ in chunk}
            self._copies(chunk).run()
        self._check(sent)

    def _check(self, sent: set[str]) -> None:
        if missing := sorted(set(self._pieces) - sent):
            raise WeightSyncError(f"{', '.join(missing[:8])} was not sent: the engine keeps older values of it")

    def _copies(self, weights: list[tuple[str, Tensor]]) -> Copies:
        names, sources, places = [], [], []
        for name, tensor in weights:
            if name not in self._pieces:
                raise WeightSyncError(f"{name!r} was sent, which was not there when the engine was first loaded")
            flat = tensor.detach().contiguous()
            for p in self._pieces[name]:
                names.append(name)
                sources.append(flat.as_strided(p.size, p.stride, flat.storage_offset() + p.offset))
                places.append(p.place)
        return Copies(names, sources, places)


class Copies:
    """Tensors and their places, which it keeps alive; each :meth:`run` copies what the tensors then hold.

    Args:
        names: of the tensors, for errors.
        sources: on any device.
        places: of the same shapes, in the engine.
    """

    def __init__(self, names: list[str], sources: list[Tensor], places: list[Tensor]) -> None:
        self._names, self._sources, self._places = names, sources, places
        windows = [_window(i, place.shape) for i, place in enumerate(places)]
        self._sent = [s[w].flatten() for s, w in zip(sources, windows, strict=True)]
        self._held = [p[w].flatten() for p, w in zip(places, windows, strict=True)]
        self._mixed = len({p.dtype for p in places}) > 1
        self._expected = self._found = torch.empty(0)

    def run(self) -> None:
        """:meth:`start` and :meth:`check`."""
        self.start()
        self.check()

    @torch.no_grad()
    def start(self) -> None:
        """Have the device copy, and a stretch of each tensor put beside what the engine holds of it then."""
        if self._names:
            torch._foreach_copy_(self._places, self._sources)
            self._found = torch.cat(self._held)
            pairs = zip(self._sent, self._held, strict=True)
            sent = [s.to(h) for s, h in pairs] if self._mixed else self._sent
            self._expected = torch.cat(sent).to(self._found)

    def check(self) -> None:
        """Wait for it, and compare.

        Raises:
            WeightSyncError: a stretch differs; the tensor is named.
        """
        if not torch.equal(_bits(self._expected), _bits(self._found)):
            sizes = [h.numel() for h in self._held]
            parts = zip(self._names, self._expected.split(sizes), self._found.split(sizes), strict=True)
            wrong = [name for name, sent, held in parts if not torch.equal(_bits(sent), _bits(held))]
            raise not_as_sent(wrong)


class _Recorder(TorchDispatchMode):
    """Writes down the copies from known storages; they are not made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: dict[int, str] = {}
        self.pieces: dict[str, list[_Piece]] = {}
        self._filled: dict[int, int] = {}  # elements of each of the engine's storages

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            place, source = args[:2]
            name = self.names.get(source.untyped_storage()._cdata)
            if name is not None and place.shape == source.shape:
                piece = _Piece(tuple(source.shape), source.stride(), source.storage_offset(), place)
                self.pieces.setdefault(name, []).append(piece)
                self._count(place)
                return place
        if func in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default):
            self._count(args[0])  # a vocabulary's padding
        return func(*args, **kwargs or {})

    def _count(self, place: Tensor) -> None:
        storage = place.untyped_storage().data_ptr()
        self._filled[storage] = self._filled.get(storage, 0) + place.numel()

    def fills(self, model: nn.Module) -> bool:
        """Tell whether every element of the model's parameters, and none twice, would have been written to."""
        there = {p.untyped_storage().data_ptr(): p.numel() for p in model.parameters() if p.numel()}
        return all(self._filled.get(storage) == size for storage, size in there.items())


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)  # a NaN equals nothing, not even the one that was sent


def _is_plain(model: nn.Module) -> bool:
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and type(method).__name__ not in _PLAIN:
            return False
        if "MLA" in type(module).__name__:
            return False  # computes further matrices from its weights when they are loaded
    return True


def _window(index: int, shape: torch.Size) -> tuple[Any, ...]:
    """Return the index of a stretch in one row of a tensor: contiguous, as fast copies want it."""
    draw = random.Random(index)
    row = [draw.randrange(size) for size in shape[:-1]]
    start = draw.randrange(max(shape[-1] - _WINDOW, 0) + 1) if shape else 0
    return (*row, slice(start, start + _WINDOW)) if shape else (...,)
