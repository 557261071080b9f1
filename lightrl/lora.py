"""LoRA through peft: adapters bound to a policy in place, switched off for the reference, merged for an engine.

The policy stays the model that it was, with peft's layers in place of some of its own; its base weights are frozen and
never written to. Left out: whatever changes or adds base weights (``modules_to_save``, biases, DoRA, PiSSA and their
kin): a push has to be able to say W + scale B A of every one of them, and the reference is the base as it was loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightrl.arguments import nearest
from lightrl.optional import import_optional
from lightrl.rng import derive_seed, forked_rng
from lightrl.sharding import full_tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ADAPTER = "default"
_UNDERSTOOD = (
    *("r", "lora_alpha", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("rank_pattern", "alpha_pattern", "use_rslora", "fan_in_fan_out", "init_lora_weights"),
)
_DESCRIPTIVE = ("peft_type", "task_type", "peft_version", "base_model_name_or_path", "revision", "auto_mapping")
_SHOWN_NAMES = 12


def lora_arguments(lora: Any) -> dict[str, Any] | None:
    """Return the arguments of a ``peft.LoraConfig`` that differ from its defaults, as plain builtins for checkpoints.

    Args:
        lora: a ``LoraConfig``, a mapping of its arguments, or None.

    Raises:
        ValueError: peft is not installed, an argument is unknown to it, or asks for more than adapters A and B without
            dropout.
    """
    if lora is None:
        return None
    config_class = import_optional("peft", "lora").LoraConfig
    names = {f.name for f in fields(config_class)}
    if isinstance(lora, Mapping):
        if unknown := sorted(set(lora) - names):
            meant = nearest(unknown[0], names)
            raise ValueError(f"lora has {', '.join(map(repr, unknown))}, which peft.LoraConfig does not know{meant}")
        lora = config_class(**lora)
    if not isinstance(lora, config_class):
        raise ValueError(f"lora={lora!r} must be a peft.LoraConfig, a dict of its arguments, or None")
    default = config_class()
    given = {name: value for name in names if (value := getattr(lora, name)) != getattr(default, name)}
    given = {name: value for name, value in given.items() if name not in _DESCRIPTIVE}
    for name, value in sorted(given.items()):
        if name not in _UNDERSTOOD or (name == "init_lora_weights" and value not in (False, "gaussian")):
            raise ValueError(
                f"lora {name}={value!r} is not supported: only A and B of the target modules are trained, from a base "
                "that stays as it is, and without dropout, or the ratio to the old policy would not be 1. Leave it out"
                + (" and name the modules in target_modules" if name == "modules_to_save" else "")
            )
    return {name: sorted(value) if isinstance(value, set) else value for name, value in given.items()}


def bind_lora(policy: PreTrainedModel, lora: dict[str, Any]) -> int:
    """Freeze ``policy``, put an adapter on its target modules (all linear ones but the head by default), in place.

    How many were bound stays with the policy, so that a push can check that it merges as many. Random values of A are
    drawn from a generator of their own, by torch's initial seed.

    Args:
        policy: not yet sharded.
        lora: as :func:`lora_arguments` returns it.

    Returns:
        The number of modules bound.

    Raises:
        ValueError: no module matches, there are adapters already, or one would be on embeddings that the head is tied
            to.
    """
    peft = import_optional("peft", "lora")
    ends = [policy.get_input_embeddings(), policy.get_output_embeddings()]
    tied = ends[1] is not None and ends[0].weight is ends[1].weight
    kinds = (nn.Linear, nn.Embedding)
    leaves = sorted({n.rpartition(".")[2] for n, m in policy.named_modules() if isinstance(m, kinds)})
    target = lora.get("target_modules", "all-linear")
    if lora_layers(policy):
        raise ValueError("lora: the model has adapters already. Give the base model, or merge them first")
    try:
        with forked_rng(derive_seed(torch.initial_seed(), "lora")):
            peft.inject_adapter_in_model(peft.LoraConfig(**lora | {"target_modules": target}), policy)
    except ValueError as error:
        raise ValueError(
            f"lora cannot bind target_modules={target!r} in {type(policy).__name__}: {error}. Its modules are "
            f"{', '.join(leaves[:_SHOWN_NAMES])}"
        ) from error
    layers = lora_layers(policy)
    if tied and any(layer.get_base_layer() in ends for layer in layers.values()):
        names = [name for name, layer in layers.items() if layer.get_base_layer() in ends]
        raise ValueError(
            f"lora on {', '.join(names)}: embeddings and head of this model are one tensor, and an adapter merged into "
            "one would change the other. Leave it out of target_modules, or untie them (tie_word_embeddings=False)"
        )
    object.__setattr__(policy, "lora_modules", len(layers))
    return len(layers)


def lora_layers(model: nn.Module) -> dict[str, Any]:
    """Return peft's LoRA layers in ``model`` by name."""
    # By what it has and not by its class: models without adapters need no peft.
    return {name: m for name, m in model.named_modules() if hasattr(m, "lora_A") and hasattr(m, "base_layer")}


def is_adapter(name: str) -> bool:
    """Tell whether a parameter's name is an adapter's.

    Example:
        >>> is_adapter("model.layers.0.mlp.up_proj.lora_A.default.weight"), is_adapter("lm_head.weight")
        (True, False)
    """
    return ".lora_" in name


@contextmanager
def adapters_off(policy: nn.Module) -> Iterator[None]:
    """Run ``policy`` as its base inside the block."""
    layers = list(lora_layers(policy).values())
    before = [layer._disable_adapters for layer in layers]
    for layer in layers:
        layer._disable_adapters = True  # enable_adapters(False) would also change requires_grad, which FSDP2 reads
    try:
        yield
    finally:
        for layer, disabled in zip(layers, before, strict=True):
            layer._disable_adapters = disabled


@torch.no_grad()
def merged_weight(layer: Any, base: Tensor) -> Tensor:
    """Return W + scale B A in float32, in memory of its own (a collective where the adapter is sharded).

    Args:
        layer: peft's layer around the base module.
        base: W, whole; it is not written to.
    """
    embedding = _ADAPTER in layer.lora_embedding_A
    a, b = (
        (layer.lora_embedding_A[_ADAPTER], layer.lora_embedding_B[_ADAPTER])
        if embedding
        else (layer.lora_A[_ADAPTER].weight, layer.lora_B[_ADAPTER].weight)
    )
    a, b = (full_tensor(x.detach()).to(base.device).float() for x in (a, b))
    delta = b @ a
    turned = embedding or layer.fan_in_fan_out
    return torch.add(base.float(), delta.T if turned else delta, alpha=layer.scaling[_ADAPTER])


def ready_to_merge(policy: nn.Module) -> dict[str, Any]:
    """Return the LoRA layers of ``policy``, or raise ValueError where not all that were bound are at work."""
    layers = lora_layers(policy)
    at_work = [x for x in layers.values() if not x.disable_adapters and not x.merged and _ADAPTER in x.active_adapters]
    bound = getattr(policy, "lora_modules", 0)
    if len(at_work) != bound or len(layers) != bound:
        raise ValueError(
            f"{len(at_work)} of {len(layers)} LoRA modules are at work and {bound} were bound: the engine would not "
            "get what is trained. Were adapters merged, disabled, added or removed since? Give RLModule(lora=...) the "
            "base model and leave its adapters to it"
        )
    return layers


def check_engine_merges(policy: nn.Module, engine_args: Mapping[str, Any]) -> None:
    """Raise ValueError where an engine with ``engine_args`` cannot take merged weights."""
    if not lora_layers(policy):
        return
    for name in ("quantization", "enable_lora"):
        if value := engine_args.get(name):
            raise ValueError(
                f"engine_args={{{name!r}: {value!r}}} with lora: the engine gets base and adapter as one plain weight, "
                "which such an engine cannot load. Leave it out"
            )
