"""Parameters of a module that rarely changes, found again in microseconds."""

from __future__ import annotations

from torch import nn


class Walk:
    """What ``modules()`` and ``named_parameters()`` give, kept while the module has what it had.

    Whatever is put in the place of a submodule or a parameter, added or removed is noticed.

    Args:
        model: the module.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules: list[tuple[nn.Module, list[nn.Module | None]]] = []
        self._parameters: list[tuple[str, nn.Module, str]] = []
        self._sizes: list[int] = []

    def modules(self) -> list[nn.Module]:
        """Return the module and all below it, each once."""
        self._refresh()
        return [module for module, _ in self._modules]

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return (name, parameter), a tied one once."""
        self._refresh()
        return [(name, module._parameters[leaf]) for name, module, leaf in self._parameters]  # type: ignore[misc]

    def _refresh(self) -> None:
        sizes = [len(m._parameters) for m, _ in self._modules]
        below = [list(m._modules.values()) for m, _ in self._modules]
        if self._modules and sizes == self._sizes and below == [b for _, b in self._modules]:
            return
        self._modules = [(m, list(m._modules.values())) for m in self._model.modules()]
        self._sizes = [len(m._parameters) for m, _ in self._modules]
        self._parameters = []
        for name, _ in self._model.named_parameters():
            path, _, leaf = name.rpartition(".")
            self._parameters.append((name, self._model.get_submodule(path), leaf))
