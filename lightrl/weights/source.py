"""The policy's weights under their checkpoint names, whole, whatever the sharding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def checkpoint_name(name: str) -> str:
    """Return a parameter's name as a checkpoint has it, without the prefixes of wrappers.

    Example:
        >>> checkpoint_name("model.layers.0._orig_mod.mlp.up_proj.weight")
        'model.layers.0.mlp.up_proj.weight'
    """
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the whole of a perhaps sharded tensor (on every rank: all must call it together)."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def iter_weights(model: PreTrainedModel | nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield (checkpoint name, full tensor in ``dtype``) for every parameter, in module order, a tied one once.

    A collective where the model is sharded: every rank must run the iterator to its end.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # a forward without backward leaves the root gathered: no sharded tensors to read
    for name, parameter in model.named_parameters():
        yield checkpoint_name(name), full_tensor(parameter.detach()).to(dtype)
