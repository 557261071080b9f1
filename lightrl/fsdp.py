"""How a model is sharded and in which precision it computes: FSDP2 over the ranks of a mesh."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from lightrl.policy import decoder_layers
from lightrl.quantized import quantized_parameters
from lightrl.sharding import sharded_modules, store_frozen

_SHARE = 0.25
"""Of a device's memory, that all layers and their gradient may take so that communication is saved."""
PRECISIONS = ("32-true", "bf16-true", "bf16-mixed")
_SMALLEST_BF16_LR = 1e-5  # below it most updates round to nothing in bfloat16 weights


def check_learning_rate(lr: float | None, precision: str) -> None:
    """Raise ValueError where most updates of size ``lr`` would round away in bfloat16 weights."""
    if precision == "bf16-true" and lr is not None and 0 < lr < _SMALLEST_BF16_LR:
        raise ValueError(
            f"lr={lr} with precision='bf16-true': updates below {_SMALLEST_BF16_LR} mostly round away in bfloat16 "
            "weights. Use precision='bf16-mixed', which keeps float32 weights."
        )


def engine_dtype(precision: str) -> torch.dtype:
    """Return the dtype of the weights of an engine beside a model that is trained in ``precision``."""
    return torch.float32 if precision == "32-true" else torch.bfloat16


def fits_whole(model: nn.Module, precision: str, device: torch.device) -> bool:
    """Whether a rank may hold all of ``model`` as it is computed with, and its gradient in float32.

    Counted is the whole of the device's memory: what is free of it is not the same in every run.
    """
    parameters = list(model.parameters())
    computed = sum(p.numel() for p in parameters) * engine_dtype(precision).itemsize
    gradient = sum(p.numel() for p in parameters if p.requires_grad) * torch.float32.itemsize
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return computed + gradient <= _SHARE * memory


def shard_model(
    model: nn.Module,
    mesh: DeviceMesh,
    precision: str,
    device: torch.device,
    *,
    reshard_after_forward: bool = True,
    offload: bool = False,
) -> None:
    """Shard each decoder layer and the rest of ``model``, in place, and move it to ``device``; once only.

    Of a model that is sharded already only what its layers do after their forward pass is changed.

    Args:
        model: on every rank the same.
        mesh: of one dimension.
        precision: one of ``PRECISIONS``.
        device: of this rank.
        reshard_after_forward: free gathered layers after their forward pass.
        offload: keep the shards in CPU memory.

    Raises:
        ValueError: it was sharded for another precision before.
    """
    # One rank has nothing to gather, only copies to make.
    reshard = reshard_after_forward and mesh.size() > 1
    layers: list[Any] = [] if isinstance(model, nn.Linear) else list(decoder_layers(model))
    if isinstance(model, FSDPModule):
        if (before := getattr(model, "sharded_for", precision)) != precision:
            raise ValueError(
                f"precision={precision!r}, and an earlier run has made this model ready for {before!r}: make a new "
                "RLModule, of a model that no run has had (load_from_checkpoint keeps what was learned)"
            )
        for layer in layers:
            layer.set_reshard_after_forward(reshard, recurse=False)
        return
    if precision == "bf16-true":
        model.to(torch.bfloat16)
    if precision == "bf16-mixed":
        store_frozen(model, torch.bfloat16)
    low = torch.bfloat16 if precision == "bf16-mixed" else None
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32),
        "ignored_params": quantized_parameters(model),
    }
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    # Nothing here writes in place to a model's output, which is what this warns of.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")
    warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec", module="lightning")
    for layer in layers:
        fully_shard(layer, reshard_after_forward=reshard, **options)
    # By default the root keeps what it has gathered, which is the device's memory that offloading is to save.
    fully_shard(model, reshard_after_forward=True if offload else None, **options)
    model.sharded_for = precision  # type: ignore[assignment]
    if not offload:
        model.to(device)


def forget_step(model: nn.Module) -> None:
    """Have the next forward of ``model`` begin a step, after an exception in the middle of one.

    Gradients that were to be reduced later are dropped, and layers are freed. Does what torch's ``reset_iter_state``
    does, which older versions lack and which keeps gradients.
    """
    for module in sharded_modules(model.modules()):
        state: Any = module._get_fsdp_state()
        if state._is_root is None:  # it has seen no forward
            continue
        state._training_state = TrainingState.IDLE
        state._state_ctx.iter_forward_root = None
        state._state_ctx.post_backward_final_callback_queued = False
        state._comm_ctx.post_forward_order.clear()
        group = state._fsdp_param_group
        if group is None:
            continue
        group._training_state = TrainingState.IDLE
        group._all_gather_result = None
        group._post_forward_indices.clear()
        for param in group.fsdp_params:
            param.unsharded_accumulated_grad = None
            if hasattr(param, "_unsharded_param"):
                param._unsharded_param.grad = None
        module.reshard()
