"""Parameters of a module that rarely changes, found again in microseconds."""

from __future__ import annotations

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
        self._known: list[Any] = []

    def modules(self) -> list[nn.Module]:
        """Return the module and all below it, each once."""
        self._refresh()
        return self._modules

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return (name, parameter), a tied one once."""
        self._refresh()
        return [(name, module._parameters[leaf]) for name, module, leaf in self._parameters]  # type: ignore[misc]

    def _refresh(self) -> None:
        if self._modules and self._seen() == self._known:
            return
        self._modules = list(self._model.modules())
        self._known = self._seen()
        self._parameters = []
        for name, _ in self._model.named_parameters():
            path, _, leaf = name.rpartition(".")
            self._parameters.append((name, self._model.get_submodule(path), leaf))

    def _seen(self) -> list[Any]:
        """What would differ if modules or names came or went, or weights were tied or untied."""
        below = [list(m._modules.values()) for m in self._modules]
        names = [list(m._parameters) for m in self._modules]
        return [below, names, len({id(p) for m in self._modules for p in m._parameters.values()})]
