"""The least time that the stages of a step can take on given hardware: arithmetic on the model's shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.utilities.throughput import get_available_flops

from lightrl.memory import ModelSize
from lightrl.types import Rollout

STAGES = ("generate", "reward", "train", "sync", "swap", "wait", "other")
"""Parts of a rollout batch's wall time: ``wait`` is for rollouts that are sampled ahead, ``other`` what is left."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """What one device can do at best; None: not known."""

    flops: float | None = None
    """Floating-point operations a second, in the precision of the matrix products."""
    bandwidth: float | None = None
    """Bytes a second from and to the device's memory."""


def hardware_of(device: torch.device, dtype: torch.dtype) -> Hardware:
    """Return what is known of a device: of GPUs that Lightning lists, their operations; of CUDA ones, their memory."""
    if device.type != "cuda":
        return Hardware()
    properties: Any = torch.cuda.get_device_properties(device)
    clock, width = (getattr(properties, name, None) for name in ("memory_clock_rate", "memory_bus_width"))
    bandwidth = 2 * 1e3 * clock * width / 8 if clock and width else None  # kHz, bits, two transfers a cycle
    return Hardware(get_available_flops(device, dtype), bandwidth)


def training_flops(size: ModelSize, heads_width: int, lengths: Sequence[int]) -> float:
    """Operations of one forward and backward pass over sequences of these lengths, recomputation not counted.

    A token costs 2 for each weight that it is multiplied with, as much again for the gradient of its activations, and
    as much for the gradient of each weight that is trained. Causal attention adds ``6 layers heads_width L^2`` for a
    sequence of L tokens.

    Args:
        size: of the policy.
        heads_width: attention heads times their dimension.
        lengths: tokens of each sequence, prompt included.

    Example:
        A model of 10 weights, 2 of them an embedding that is looked up, not multiplied; three tokens in one sequence:
        6 x 8 x 3 = 144, and 6 x 1 x 4 x 9 = 216 for attention.
    """
    multiplied = size.base + size.adapters - size.outside + size.hidden * size.vocabulary
    per_token = 4 * multiplied + 2 * min(size.trained, multiplied)
    return float(per_token * sum(lengths) + 6 * size.layers * heads_width * sum(n * n for n in lengths))


def heads_width(config: Any) -> int:
    """Return attention heads times their dimension, of a transformers configuration."""
    text = config.get_text_config()
    heads: int = text.num_attention_heads
    width: int = getattr(text, "head_dim", None) or text.hidden_size // heads
    return heads * width


def generation_bytes(
    size: ModelSize, rollouts: Sequence[Rollout], bytes_per_value: int, engine_ranks: int = 1
) -> float:
    """Bytes that one rank of an engine reads to sample its share of completions, all of them at once.

    Every token of the longest completion reads all weights once, and each sequence reads its keys and values. The
    ``engine_ranks`` that share an engine share the weights; each is taken to have as many completions as this one.
    """
    longest = max((len(r.completion_ids) for r in rollouts), default=0)
    cached = sum(_positions(len(r.prompt_ids), len(r.completion_ids)) for r in rollouts)
    return float(bytes_per_value * (size.base * longest / engine_ranks + size.cached_per_token * cached))


def _positions(prompt: int, completion: int) -> int:
    """Positions read over all steps of one completion: prompt, prompt + 1, ... up to prompt + completion - 1."""
    return completion * prompt + completion * (completion - 1) // 2


def push_bytes(size: ModelSize, bytes_per_value: int) -> float:
    """Bytes that a push of all weights within one device's memory reads and writes."""
    return float(2 * size.base * bytes_per_value)
