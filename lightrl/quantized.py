"""A frozen base in 4 bits (QLoRA, arXiv:2305.14314) and 8-bit optimizer state, where bitsandbytes is installed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightrl.optional import import_optional

QUANTIZATIONS = ("4bit",)


def import_bitsandbytes(wanted: str) -> Any:
    """Import bitsandbytes for ``wanted``, an argument as the user wrote it.

    Raises:
        ValueError: it is not installed, or there is no CUDA device, without which it does nothing that is needed here.
    """
    bitsandbytes = import_optional("bitsandbytes", wanted)
    if not torch.cuda.is_available():
        raise ValueError(f"{wanted} needs a CUDA device, and there is none here: leave it out")
    return bitsandbytes


def loading_arguments(quantize: str | None) -> dict[str, Any]:
    """Return what ``from_pretrained`` needs to load a base in 4 bits (NF4, bfloat16 arithmetic); nothing for None.

    Raises:
        ValueError: bitsandbytes or a GPU is missing.
    """
    if quantize is None:
        return {}
    import_bitsandbytes(f"quantize={quantize!r}")
    from transformers import BitsAndBytesConfig

    return {
        "quantization_config": BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    }


def is_quantized(parameter: Tensor) -> bool:
    """Tell whether a parameter holds packed 4-bit values."""
    return hasattr(parameter, "quant_state")


def plain_shape(parameter: Tensor) -> torch.Size:
    """Return the shape of :func:`plain_weight`, of all of it where it is sharded."""
    packed: Any = parameter
    return torch.Size(packed.quant_state.shape) if is_quantized(parameter) else parameter.shape


def plain_weight(parameter: Tensor) -> Tensor:
    """Return a parameter's values: itself, detached, or what its packed values stand for, in memory of their own."""
    if not is_quantized(parameter):
        return parameter.detach()
    packed: Any = parameter
    functional = import_optional("bitsandbytes.functional", "a 4-bit base")
    values: Tensor = functional.dequantize_4bit(packed.data, packed.quant_state)
    return values


def quantized_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that cannot be sharded: each rank keeps them whole, at half a byte a value."""
    return {p for p in model.parameters() if is_quantized(p)}
