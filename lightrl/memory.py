"""What a run will need of each device's memory, before it is started: pure arithmetic on the model's shape.

Weights, gradients and optimizer state are exact. Activations are counted from what a decoder layer keeps for its
backward pass; allocator overhead, CUDA context and the engine's own buffers (1 to 3 GiB together) are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lightrl.arguments import check_at_least_one, check_choice
from lightrl.fused_logprobs import CHUNK_SIZE
from lightrl.lora import bind_lora, is_adapter, lora_arguments
from lightrl.optim import OPTIMIZERS
from lightrl.policy import decoder_layers, train_only

_TRAINED = {"32-true": 4, "bf16-mixed": 4, "bf16-true": 2}
_COMPUTED = {"32-true": 4, "bf16-mixed": 2, "bf16-true": 2}
_NF4 = 0.5 + 1 / 64  # a 4-bit value, and its share of a block's doubly quantised scale, in bytes
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The shape of a model, in numbers of values."""

    base: int
    """Parameters without adapters; a tied one counts once."""
    adapters: int
    trained: int
    quantizable: int
    """Of the base: weights that a 4-bit base packs."""
    layers: int
    layer: int
    """Parameters of the largest decoder layer."""
    outside: int
    """Parameters outside the layers: embeddings, head, final norm."""
    hidden: int
    vocabulary: int
    kept_per_token: int
    """What one layer keeps for its backward pass, for each token."""
    cached_per_token: int
    """Keys and values of all layers, for each token."""
    kv_heads: int


@dataclass(frozen=True, slots=True)
class Row:
    """One consumer of a device's memory."""

    name: str
    bytes: float
    trains: bool = True
    """There while the policy is updated."""
    samples: bool = True
    """There while rollouts are made."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """All of them, on one device."""

    rows: tuple[Row, ...]

    @property
    def training(self) -> float:
        """Bytes while the policy is updated."""
        return sum(r.bytes for r in self.rows if r.trains)

    @property
    def rollouts(self) -> float:
        """Bytes while rollouts are made."""
        return sum(r.bytes for r in self.rows if r.samples)

    @property
    def peak(self) -> float:
        """Bytes that the device has to have."""
        return max(self.training, self.rollouts)

    def table(self) -> str:
        """Return the rows and their sums as text, in GiB."""
        lines = [f"{'GiB on each device':34}{'training':>10}{'rollouts':>10}"]
        for r in self.rows:
            cells = (f"{r.bytes / _GIB:10.2f}" if there else f"{'-':>10}" for there in (r.trains, r.samples))
            lines.append(f"{r.name:34}" + "".join(cells))
        return "\n".join([*lines, f"{'sum':34}{self.training / _GIB:10.2f}{self.rollouts / _GIB:10.2f}"])


def model_size(
    config: Any, *, lora: Any = None, trainable: str | list[str] | None = None, trust_remote_code: bool = False
) -> ModelSize:
    """Return the shape of the causal language model that ``config`` describes, without allocating it.

    Args:
        config: of transformers, such as ``load_config`` returns.
        lora: see :class:`lightrl.RLModule`.
        trainable: see :class:`lightrl.RLModule`.
        trust_remote_code: run code that comes with the model.

    Raises:
        ValueError: ``lora`` or ``trainable`` does not fit the model.
    """
    from transformers import AutoModelForCausalLM

    text = config.get_text_config()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
        packed = [m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear)]
        head = model.get_output_embeddings()
        layers = [sum(p.numel() for p in layer.parameters()) for layer in decoder_layers(model)]
        base = sum(p.numel() for p in model.parameters())
        given = lora_arguments(lora)
        if given is not None:
            bind_lora(model, given)
        if trainable is not None:
            train_only(model, [trainable] if isinstance(trainable, str) else trainable)
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    # Two norms keep their input and output, attention its queries, keys, values and output, and the output projection
    # and the MLP their inputs; a gated MLP keeps gate, up, activated gate and product.
    kept = 5 * text.hidden_size + (2 * heads + 2 * kv_heads) * head_dim + 4 * inner
    return ModelSize(
        base=base,
        adapters=sum(p.numel() for n, p in model.named_parameters() if is_adapter(n)),
        trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
        quantizable=sum(packed) - (head.weight.numel() if isinstance(head, torch.nn.Linear) else 0),
        layers=len(layers),
        layer=max(layers),
        outside=base - sum(layers),
        hidden=text.hidden_size,
        vocabulary=text.vocab_size,
        kept_per_token=kept,
        cached_per_token=2 * len(layers) * kv_heads * head_dim,
        kv_heads=kv_heads,
    )


def estimate_memory(
    size: ModelSize,
    *,
    devices: int = 1,
    precision: str = "bf16-mixed",
    optimizer: str = "adamw",
    quantize: str | None = None,
    reference: bool = False,
    own_critic: bool = False,
    gradient_checkpointing: bool = False,
    max_tokens_per_micro_batch: int = 16384,
    cached_tokens: int = 16384,
    tensor_parallel_size: int = 1,
    sleep: bool = True,
    offload_optimizer: bool = True,
    keeps_layers: bool = False,
) -> MemoryPlan:
    """Say what each device holds while ``"colocated_vllm"`` trains and while it samples.

    Args:
        size: of the policy.
        devices: ranks, over which all that is trained is sharded.
        precision: the Trainer's.
        optimizer: see :class:`lightrl.RLModule`.
        quantize: likewise.
        reference: a frozen copy on the device (``kl_coef`` above 0, no LoRA, no ``reference_device="cpu"``).
        own_critic: PPO with ``critic="own"``.
        gradient_checkpointing: see :class:`lightrl.RLModule`.
        max_tokens_per_micro_batch: the datamodule's.
        cached_tokens: tokens of all completions that are sampled at once, prompts included: the engine's cache.
        tensor_parallel_size: ranks that share an engine.
        sleep: the strategy's.
        offload_optimizer: the strategy's.
        keeps_layers: each device has all layers and their gradient whole while it trains; a single one always has.

    Raises:
        ValueError: precision or optimizer is unknown, or a count is below 1.
    """
    check_choice("precision", precision, tuple(_TRAINED))
    check_choice("optimizer", optimizer, tuple(OPTIMIZERS))
    check_at_least_one(devices=devices, tensor_parallel_size=tensor_parallel_size, cached_tokens=cached_tokens)
    check_at_least_one(max_tokens_per_micro_batch=max_tokens_per_micro_batch)
    stored, computed, choice = _TRAINED[precision], _COMPUTED[precision], OPTIMIZERS[optimizer]
    packed = size.quantizable if quantize else 0
    trained = size.trained + (size.base if own_critic else 0)
    state = trained * choice.state_bytes * stored / 4
    frozen = size.base + size.adapters - size.trained - packed
    cached = size.cached_per_token / min(tensor_parallel_size, size.kv_heads)
    rows = (
        Row("weights, trained", trained * stored / devices),
        Row("weights, frozen", frozen * computed / devices + packed * _NF4),
        Row("reference", size.base * computed / devices if reference else 0),
        Row("gradients", trained * stored / devices),
        Row("optimizer state", state / devices if choice.on_device else 0, samples=not offload_optimizer),
        *_rows_of_layers(size, packed, computed, keeps_layers or devices == 1),
        *_rows_of_a_micro_batch(size, computed, max_tokens_per_micro_batch, gradient_checkpointing),
        Row("engine weights", size.base * computed / tensor_parallel_size, trains=not sleep),
        Row("engine cache", cached_tokens * cached * computed, trains=not sleep),
    )
    return MemoryPlan(tuple(r for r in rows if r.bytes))


def _rows_of_layers(size: ModelSize, packed: int, computed: int, all_of_them: bool) -> list[Row]:
    """What is gathered of the policy in a backward pass: ``computed`` is the bytes of one computed value."""
    gathered = size.base + size.adapters - packed if all_of_them else 2 * size.layer + size.outside
    trained = size.trained / (size.base + size.adapters)
    reduced = (size.layer + size.outside) * trained
    parts = {
        "all layers, gathered" if all_of_them else "two layers and the rest, gathered": gathered * computed,
        # And the float32 copy that is reduced.
        "their gradients, before reduction": reduced * computed + 4 * (size.trained if all_of_them else reduced),
    }
    return [Row(name, bytes, samples=False) for name, bytes in parts.items()]


def _rows_of_a_micro_batch(size: ModelSize, computed: int, tokens: int, gradient_checkpointing: bool) -> list[Row]:
    """What ``tokens`` of one need in its backward pass beside the state and the layers."""
    kept = size.kept_per_token * (1 if gradient_checkpointing else size.layers)
    kept += size.hidden * size.layers if gradient_checkpointing else 0
    logits = min(CHUNK_SIZE, tokens * size.vocabulary)
    parts = {"activations": tokens * kept * computed, "logits of a chunk": logits * computed}
    return [Row(name, bytes, samples=False) for name, bytes in parts.items()]
