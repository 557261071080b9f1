"""A frozen base in 4 bits (QLoRA, arXiv:2305.14314) and 8-bit optimizer state, where bitsandbytes is installed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

QUANTIZATIONS = ("4bit",)


def import_bitsandbytes(wanted: str) -> Any:
    """Import bitsandbytes for ``wanted``, an argument as the user wrote it.

    Raises:
        ValueError: it is not installed, or there is no CUDA device, without which it does nothing that is needed here.
    """
    fix = "leave it out, or run on an NVIDIA GPU with bitsandbytes (pip install bitsandbytes)"
    try:
        import bitsandbytes
    except ImportError as error:
        raise ValueError(f"{wanted} needs bitsandbytes, which is not installed here: {fix} ({error})") from error
    if not torch.cuda.is_available():
        raise ValueError(f"{wanted} needs a CUDA device, and there is none here: {fix}")
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
    from bitsandbytes.functional import dequantize_4bit

    values: Tensor = dequantize_4bit(parameter.data, parameter.quant_state)  # type: ignore[attr-defined]
    return values


def quantized_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that cannot be sharded: each rank keeps them whole, at half a byte a value."""
    return {p for p in model.parameters() if is_quantized(p)}
