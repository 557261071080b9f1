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
        self._parameters: list[tuple[str, nn.Module, str]] = []
        self._tables: list[dict[str, Any]] = []
        self._known: list[Any] = []
        self._names: list[Any] = []

    def modules(self) -> list[nn.Module]:
        """Return the module and all below it, each once."""
        self._refresh()
        return self._modules

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return (name, parameter), a tied one once."""
        self._refresh()
        return [(name, module._parameters[leaf]) for name, module, leaf in self._parameters]  # type: ignore[misc]

    def _refresh(self) -> None:
        if self._modules and self._is_same():
            return
        self._modules = list(self._model.modules())
        self._tables = [table for m in self._modules for table in (m._modules, m._parameters)]
        self._known = list(chain.from_iterable(map(dict.values, self._tables)))  # held: no other can get their ids
        self._names = self._outline()
        self._parameters = []
        for name, _ in self._model.named_parameters():
            path, _, leaf = name.rpartition(".")
            self._parameters.append((name, self._model.get_submodule(path), leaf))

    def _is_same(self) -> bool:
        there = chain.from_iterable(map(dict.values, self._tables))
        return all(map(operator.is_, there, self._known)) and self._outline() == self._names

    def _outline(self) -> list[Any]:
        return [*map(len, self._tables), *chain.from_iterable(self._tables)]
