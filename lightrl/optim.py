"""The optimizer, and learning rate schedules."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightrl.distributed import world_size
from lightrl.quantized import import_bitsandbytes
from lightrl.sharding import local_tensor, shard

SCHEDULES = ("constant", "linear", "cosine")


@dataclass(frozen=True, slots=True)
class Choice:
    """An optimizer that ``RLModule(optimizer=...)`` can name."""

    make: Callable[..., torch.optim.Optimizer]
    """Called with parameter groups and ``betas``."""
    state_bytes: float
    """Bytes of state for each trained parameter."""
    on_device: bool = True
    """False: its state is in CPU memory between two steps."""
    needs_bitsandbytes: bool = False


def make_optimizer(
    parameters: Iterable[tuple[Iterable[torch.nn.Parameter], float]],
    *,
    betas: tuple[float, float],
    weight_decay: float,
    name: str = "adamw",
) -> torch.optim.Optimizer:
    """Return an optimizer of the parameters that are trained, without decay on vectors; fused on CUDA.

    Args:
        parameters: lots of parameters, each with its peak learning rate.
        betas: AdamW's.
        weight_decay: on matrices.
        name: one of ``OPTIMIZERS``.

    Raises:
        ValueError: nothing is trained, or bitsandbytes is missing, or meets several ranks.
    """
    groups = []
    for lot, lr in parameters:
        trained = [p for p in lot if p.requires_grad]
        for decay, chosen in (
            (weight_decay, [p for p in trained if p.ndim > 1]),
            (0.0, [p for p in trained if p.ndim <= 1]),
        ):
            if chosen:
                groups.append({"params": chosen, "lr": lr, "weight_decay": decay})
    if not groups:
        raise ValueError("no parameter is trained: everything is frozen")
    return OPTIMIZERS[name].make(groups, betas=betas)


def _adamw(groups: list[dict[str, Any]], **args: Any) -> torch.optim.Optimizer:
    return AdamW(groups, fused=_on_cuda(groups), **args)


def _adamw_offload(groups: list[dict[str, Any]], **args: Any) -> torch.optim.Optimizer:
    return OffloadedAdamW(groups, fused=_on_cuda(groups), **args)


def _on_cuda(groups: list[dict[str, Any]]) -> bool:
    return any(p.device.type == "cuda" for group in groups for p in group["params"])


def _of_bitsandbytes(kind: str) -> Callable[..., torch.optim.Optimizer]:
    def make(groups: list[dict[str, Any]], **args: Any) -> torch.optim.Optimizer:
        if world_size() > 1:
            raise ValueError(
                f"bitsandbytes' {kind} on {world_size()} ranks: its state cannot be saved in shards. Use one device, "
                "or optimizer='adamw', whose state is sharded over the ranks"
            )
        found: type[torch.optim.Optimizer] = getattr(import_bitsandbytes(f"bitsandbytes' {kind}").optim, kind)
        made: Any = on_local_tensors(found)(groups, **args)
        made.places_own_state = kind.startswith("Paged")
        return made  # type: ignore[no-any-return]

    return make


OPTIMIZERS = {
    "adamw": Choice(_adamw, 8),
    "adamw_offload": Choice(_adamw_offload, 8, on_device=False),
    "adamw_8bit": Choice(_of_bitsandbytes("AdamW8bit"), 2, needs_bitsandbytes=True),
    "paged_adamw": Choice(_of_bitsandbytes("PagedAdamW"), 8, on_device=False, needs_bitsandbytes=True),
    "paged_adamw_8bit": Choice(_of_bitsandbytes("PagedAdamW8bit"), 2, on_device=False, needs_bitsandbytes=True),
}
"""By the name that ``RLModule(optimizer=...)`` takes."""


class AdamW(torch.optim.AdamW):
    """torch's, whose kernel is given each rank's shards: for DTensors a GPU waits longer than the update takes."""

    def _init_group(self, group: Any, *tensors: list[Tensor]) -> bool:
        is_complex: bool = super()._init_group(group, *tensors)  # type: ignore[no-untyped-call]
        for found in tensors:
            found[:] = [shard(tensor) for tensor in found]
        return is_complex


class OffloadedAdamW(torch.optim.AdamW):
    """AdamW whose state is on the parameter's device only while that parameter is updated, else in CPU memory."""

    places_own_state = True
    """A strategy that moves optimizer state about leaves this one's where it is."""

    def step(self, closure: Any = None) -> Any:
        """Update one parameter after the other."""
        loss = closure() if closure is not None else None
        groups = self.param_groups
        try:
            for group in groups:
                for parameter in group["params"]:
                    self.param_groups = [{**group, "params": [parameter]}]
                    self._move(parameter, parameter.device)
                    super().step()
                    self._move(parameter, torch.device("cpu"))
        finally:
            self.param_groups = groups
        return loss

    def load_state_dict(self, state_dict: Any) -> None:
        """Load, and put the state back into CPU memory: torch loads it onto the parameters' device."""
        super().load_state_dict(state_dict)
        for parameter in self.state:
            self._move(parameter, torch.device("cpu"))

    def _move(self, parameter: Tensor, device: torch.device) -> None:
        state = self.state.get(parameter, {})
        for key, value in state.items():
            if isinstance(value, Tensor) and value.ndim:
                state[key] = value.to(device)


def on_local_tensors(kind: type[torch.optim.Optimizer]) -> Any:
    """Return a subclass of an optimizer that knows no DTensor: it steps on what a single rank has of each."""

    class OnLocalTensors(kind):  # type: ignore[misc, valid-type]
        param_groups: list[dict[str, Any]]
        state: Any

        def step(self, closure: Any = None) -> Any:
            loss = closure() if closure is not None else None
            groups, state = self.param_groups, self.state
            local = {p: _leaf(p) for group in groups for p in group["params"]}
            try:
                self.param_groups = [{**g, "params": [local[p] for p in g["params"]]} for g in groups]
                self.state = defaultdict(dict, {local[p]: values for p, values in state.items()})
                super().step()
                for p, leaf in local.items():
                    if leaf in self.state:
                        state[p] = self.state[leaf]
            finally:
                self.param_groups, self.state = groups, state
            return loss

    OnLocalTensors.__name__ = OnLocalTensors.__qualname__ = kind.__name__
    return OnLocalTensors


def _leaf(parameter: Tensor) -> Tensor:
    leaf = local_tensor(parameter).requires_grad_()
    leaf.grad = None if parameter.grad is None else local_tensor(parameter.grad)
    return leaf


def schedule_factor(schedule: str, warmup_steps: int, total_steps: float | None) -> Callable[[int], float]:
    """Return the factor on the peak learning rate as a function of optimizer steps done.

    Args:
        schedule: ``"constant"``, ``"linear"`` or ``"cosine"``.
        warmup_steps: steps over which the factor rises from 0 to 1.
        total_steps: the step at which linear and cosine reach 0; they need it.

    Raises:
        ValueError: the run has no known end and the schedule needs one.

    Example:
        >>> f = schedule_factor("linear", 2, 10)
        >>> [f(s) for s in (0, 1, 2, 6, 10)]
        [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    if schedule != "constant" and (total_steps is None or math.isinf(total_steps)):
        raise ValueError(
            f"schedule={schedule!r} needs to know the run's length: set Trainer(max_steps=...) or max_epochs"
        )

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        if schedule == "constant" or total_steps is None:
            return 1.0
        done = min(1.0, (step - warmup_steps) / max(1.0, total_steps - warmup_steps))
        return 1.0 - done if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))

    return factor
