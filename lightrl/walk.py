"""Parameters of a module that rarely changes, found again in microseconds."""

from __future__ import annotations

import operator
from itertools import chain
from typing import Any

from torch import nn


class Walk:
    """What ``modules()`` and ``named_parameters()`` give, kept while the module has what it had.

    Whatever is put in the place of a submodule or a parameter, added or removed is noticed.

    Args:
        model: the module.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules: list[nn.Module] = []
        self._parameters: list[tuple[str, nn.Parameter]] = []
        self._children, self._leaves = _Seen([]), _Seen([])

    def modules(self) -> list[nn.Module]:
        """Return the module and all below it, each once."""
        if not self._modules or self._children.changed():
            self._modules = list(self._model.modules())
            self._children = _Seen([m._modules for m in self._modules])
            self._leaves = _Seen([])
        return self._modules

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return (name, parameter), a tied one once."""
        modules = self.modules()
        if not self._leaves.tables or self._leaves.changed():
            self._leaves = _Seen([m._parameters for m in modules])
            self._parameters = list(self._model.named_parameters())
        return self._parameters


class _Seen:
    """What tables by name held at one time."""

    def __init__(self, tables: list[dict[str, Any]]) -> None:
        self.tables = tables
        self._held = list(chain.from_iterable(map(dict.values, tables)))  # so that no other can get their ids
        self._names = self._outline()

    def changed(self) -> bool:
        """Whether something else is there now, or under another name."""
        there = chain.from_iterable(map(dict.values, self.tables))
        return self._outline() != self._names or not all(map(operator.is_, there, self._held))

    def _outline(self) -> list[Any]:
        return [*map(len, self.tables), *chain.from_iterable(self.tables)]
