"""The frozen policy that the KL is measured to: a copy, or with LoRA the policy's own base, which costs no memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from lightrl.lora import adapters_off, is_adapter
from lightrl.sharding import full_tensor, local_tensor, reshard, write_full

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Reference(Protocol):
    """What scores rollouts for the KL."""

    def model(self) -> AbstractContextManager[PreTrainedModel]:
        """Give the model to run, right inside the block only."""

    def refresh(self) -> None:
        """Become what the policy is now."""

    def state(self) -> dict[str, Tensor]:
        """Return what a resumed run cannot rebuild, whole, on the CPU (a collective)."""

    def load(self, state: dict[str, Tensor]) -> None:
        """Go back to ``state``."""


class CopyReference:
    """A frozen copy of the policy, sharded as the policy is.

    Args:
        policy: what it is a copy of.
        frozen: the copy.
    """

    def __init__(self, policy: PreTrainedModel, frozen: PreTrainedModel) -> None:
        self.policy, self.frozen = policy, frozen.requires_grad_(False).eval()

    @contextmanager
    def model(self) -> Iterator[PreTrainedModel]:
        """See :class:`Reference`."""
        yield self.frozen

    @torch.no_grad()
    def refresh(self) -> None:
        """See :class:`Reference`."""
        reshard(self.policy)
        reshard(self.frozen)
        for mine, its in zip(self.frozen.parameters(), self.policy.parameters(), strict=True):
            local_tensor(mine).copy_(local_tensor(its))

    def state(self) -> dict[str, Tensor]:
        """See :class:`Reference`."""
        reshard(self.frozen)
        return {n: full_tensor(p.detach()).cpu().clone() for n, p in self.frozen.named_parameters()}

    def load(self, state: dict[str, Tensor]) -> None:
        """See :class:`Reference`."""
        reshard(self.frozen)
        for name, parameter in self.frozen.named_parameters():
            write_full(parameter, state[name])


class AdapterReference:
    """The policy with its adapters off; once refreshed, with its adapters as they were then.

    Args:
        policy: with LoRA bound.
    """

    def __init__(self, policy: PreTrainedModel) -> None:
        self.policy = policy
        self._kept: dict[str, Tensor] = {}  # this rank's parts of the adapters; none: the base

    @contextmanager
    def model(self) -> Iterator[PreTrainedModel]:
        """See :class:`Reference`."""
        if not self._kept:
            with adapters_off(self.policy):
                yield self.policy
            return
        now = self._adapters()
        trained = {n: local_tensor(p).clone() for n, p in now.items()}
        _write(now, self._kept)
        try:
            yield self.policy
        finally:
            _write(self._adapters(), trained)

    def _adapters(self) -> dict[str, nn.Parameter]:
        reshard(self.policy)  # what is gathered is a copy, and stays as it was when the shards are written to
        return {n: p for n, p in self.policy.named_parameters() if is_adapter(n)}

    def refresh(self) -> None:
        """See :class:`Reference`."""
        self._kept = {n: local_tensor(p).clone() for n, p in self._adapters().items()}

    def state(self) -> dict[str, Tensor]:
        """See :class:`Reference`."""
        if not self._kept:
            return {}
        with self.model():
            return {n: full_tensor(p.detach()).cpu().clone() for n, p in self._adapters().items()}

    def load(self, state: dict[str, Tensor]) -> None:
        """See :class:`Reference`."""
        if not state:
            self._kept = {}
            return
        now = self._adapters()
        trained = {n: local_tensor(p).clone() for n, p in now.items()}
        for name, parameter in now.items():
            write_full(parameter, state[name])
        self.refresh()
        _write(self._adapters(), trained)


@torch.no_grad()
def _write(parameters: dict[str, nn.Parameter], local: dict[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        local_tensor(parameter).copy_(local[name])
