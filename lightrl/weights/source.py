"""The policy's weights under their checkpoint names, whole, whatever the sharding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lightrl.lora import is_adapter, merged_weight, ready_to_merge
from lightrl.quantized import plain_weight
from lightrl.sharding import full_tensor, reshard

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "base_layer.")


def checkpoint_name(name: str) -> str:
    """Return a parameter's name as a checkpoint has it, without the prefixes of wrappers and adapters.

    Example:
        >>> checkpoint_name("model.layers.0._orig_mod.mlp.up_proj.weight")
        'model.layers.0.mlp.up_proj.weight'
    """
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


@torch.no_grad()
def iter_weights(model: PreTrainedModel | nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield (checkpoint name, full tensor in ``dtype``) for every parameter, in module order, a tied one once.

    With LoRA the names and shapes are the base's and a weight is W + scale B A, made in float32 one tensor at a time:
    nothing of the policy is written to. A collective where the model is sharded: every rank must run the iterator to
    its end.

    Raises:
        ValueError: not all LoRA modules that were bound are at work.
    """
    reshard(model)
    adapted = ready_to_merge(model)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            continue
        weight = full_tensor(plain_weight(parameter))
        path, _, leaf = name.rpartition(".")
        layer = adapted.get(path.removesuffix(".base_layer"))
        if layer is not None and leaf == "weight":
            weight = merged_weight(layer, weight)
        yield checkpoint_name(name), weight.to(dtype)
