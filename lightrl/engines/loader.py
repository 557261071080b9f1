"""Weights into an engine's module: by plan where its layout is plain, else by vLLM's reload; checked always."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lightrl.engines import compat
from lightrl.engines.base import not_as_sent
from lightrl.engines.fingerprint import Fingerprint
from lightrl.engines.plan import Copies, CopyPlan
from lightrl.walk import Walk
from lightrl.weights.source import Weights


class Loader:
    """Loads one module again and again.

    What vLLM reloads is compared tensor by tensor each time. A plan is compared so once; later a stretch of every
    tensor is.

    Args:
        model: the engine's module on this rank.
        tp_rank: this rank's place in its tensor-parallel group.
        reload: vLLM's ``reload_weights`` on an iterator of (checkpoint name, full tensor).
    """

    def __init__(self, model: Any, tp_rank: int, reload: Callable[[Iterator[tuple[str, Tensor]]], object]) -> None:
        self._model, self._tp_rank, self._reload = model, tp_rank, reload
        self._walk = Walk(model)
        self._device = next(model.parameters()).device
        self._places: list[int] = []
        self._plan: CopyPlan | None = None
        self._sender: Weights | None = None
        self._copied: list[tuple[str, Tensor]] | None = None
        self._copies: Copies | None = None

    @torch.no_grad()
    def load(self, weights: Weights) -> None:
        """Put all of ``weights`` in.

        Raises:
            WeightSyncError: a tensor did not arrive as it was sent; it is named.
        """
        if began := (self._copies is not None and weights is self._sender):
            # Most pushes are like the last: the device copies while the host looks whether this one is. Where it is
            # not, what was copied is overwritten below, and memory that is in use no more was written to.
            self._copies.start()
        places = self._where()
        if places != self._places:  # the first time, or the engine has moved its parameters
            self._plan = CopyPlan.record(self._model, weights.outline())
            self._sender = self._copied = self._copies = None
            self._load_compared(weights)
            self._places = places  # not before it was compared: what failed is compared again
        elif self._plan is None:
            self._load_compared(weights)
        elif (held := weights.held()) is None:
            self._plan.copy(self._here(weights))
        else:
            self._copy_held(weights, held, began)

    def _copy_held(self, weights: Weights, held: list[tuple[str, Tensor]], began: bool) -> None:
        assert self._plan is not None
        if self._copies is None or held is not self._copied:
            self._copies, self._copied = self._plan.bind(held), held
            began = False
        self._sender = weights
        if not began:
            self._copies.start()
        self._copies.check()

    def _where(self) -> list[int]:
        with torch._C.DisableTorchFunctionSubclass():  # vLLM's parameters are of classes that would make this slow
            return list(map(Tensor.data_ptr, map(operator.itemgetter(1), self._walk.parameters())))

    def _load_compared(self, weights: Weights) -> None:
        fingerprint = Fingerprint(self._model, self._tp_rank)
        watched = fingerprint.watch(self._here(weights))
        if self._plan is not None:
            self._plan.copy(watched)
        else:
            self._reload(watched)
            compat.repack_tied_head(self._model)
        if wrong := fingerprint.mismatches():
            raise not_as_sent(wrong)

    def _here(self, weights: Weights) -> Iterator[tuple[str, Tensor]]:
        return ((name, tensor.to(self._device)) for name, tensor in weights)
