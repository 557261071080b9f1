"""Parameters found again after whatever may happen to a module."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightrl.walk import Walk


def tied() -> nn.Module:
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))})
    model["a"].weight = model["b"][0].weight  # type: ignore[assignment, index]
    return model


def rename(model: Any) -> None:
    model["a"]._parameters["other"] = model["a"]._parameters.pop("weight")


CHANGES: dict[str, Callable[[Any], object]] = {
    "nothing": lambda model: None,
    "a value": lambda model: model["a"].weight.data.add_(1),
    "a parameter replaced": lambda model: setattr(model["b"][1], "weight", nn.Parameter(torch.ones(2, 2))),
    "a parameter added": lambda model: model["a"].register_parameter("more", nn.Parameter(torch.ones(1))),
    "a parameter renamed": rename,
    "a module replaced": lambda model: model["b"].__setitem__(1, nn.Linear(3, 3)),
    "a module added": lambda model: model["b"].append(nn.Linear(3, 3)),
    "weights untied": lambda model: setattr(model["a"], "weight", nn.Parameter(torch.ones(2, 2))),
    "weights tied": lambda model: setattr(model["b"][1], "weight", model["a"].weight),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_it_finds_is_what_is_there(change: str) -> None:
    model = tied()
    walk = Walk(model)
    for happens in (CHANGES["nothing"], CHANGES[change]):
        happens(model)
        assert walk.modules() == list(model.modules())
        found, there = walk.parameters(), list(model.named_parameters())
        assert [(name, id(p)) for name, p in found] == [(name, id(p)) for name, p in there]
