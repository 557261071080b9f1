"""The policy's weights under their checkpoint names, whole, whatever the sharding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightrl.engines.base import WeightSyncError
from lightrl.lora import is_adapter, merged_weight, ready_to_merge
from lightrl.policy import plain_class
from lightrl.quantized import is_quantized, plain_shape, plain_weight
from lightrl.rng import forked_rng
from lightrl.sharding import full_tensors, local_tensor, reshard, reshard_all, shard, sharded_modules, whole_in_place
from lightrl.walk import Walk

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CHUNK_BYTES = 2**28
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
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


Shapes = Mapping[str, torch.Size]
"""Of each tensor that an engine takes, by checkpoint name."""


def plain_shapes(policy: PreTrainedModel) -> dict[str, torch.Size]:
    """Return what an engine takes of ``policy``: the tensors of its class in transformers, without what was added."""
    plain: nn.Module = policy
    if plain_class(policy) is not type(policy):
        with forked_rng(0), torch.device("meta"):
            plain = plain_class(policy)(policy.config)
    return {checkpoint_name(name): p.shape for name, p in plain.named_parameters() if not is_adapter(name)}


def check_shapes(model: nn.Module, shapes: Shapes) -> None:
    """Raise WeightSyncError, naming a tensor, where ``model`` lacks one of ``shapes`` or has another shape of it."""
    reshard(model)
    held = {checkpoint_name(name): p.shape for name, p in model.named_parameters() if not is_adapter(name)}
    for name, shape in shapes.items():
        if held.get(name) != shape:
            has = f"is {list(held[name])}" if name in held else "is not there"
            raise WeightSyncError(
                f"{name} {has} in the trained model and {list(shape)} in the engine's: the engine was built for the "
                "model as it was at first, and a push cannot change its shape. Nothing was sent"
            )


class Weights(Protocol):
    """Tensors under their checkpoint names, all that an engine needs."""

    def outline(self) -> list[tuple[str, Tensor]]:
        """Return (checkpoint name, tensor of the right shape and dtype without storage), in order."""

    def held(self) -> list[tuple[str, Tensor]] | None:
        """Return (checkpoint name, full tensor) pairs that lie in memory as they are, in any dtype; None: no such.

        They may be kept: at the next push the same memory has newer values.
        """

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (checkpoint name, full tensor) in the outline's order and dtype, perhaps made one by one."""


class HeldWeights:
    """:class:`Weights` that are there.

    Args:
        pairs: (checkpoint name, full tensor).
        stay: the next push lies in the same memory; otherwise nobody is to keep it.
    """

    def __init__(self, pairs: list[tuple[str, Tensor]], *, stay: bool = True) -> None:
        self._pairs, self._stay = pairs, stay

    def outline(self) -> list[tuple[str, Tensor]]:
        """See :class:`Weights`."""
        return [(name, torch.empty_like(tensor, device="meta")) for name, tensor in self._pairs]

    def held(self) -> list[tuple[str, Tensor]] | None:
        """See :class:`Weights`."""
        return self._pairs if self._stay else None

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._pairs)


class PolicyWeights:
    """:class:`Weights` of a policy, whatever its sharding.

    Args:
        model: the policy.
        dtype: that they are wanted in.
        shapes: leave out what is not among these; None: nothing.
    """

    def __init__(self, model: PreTrainedModel | nn.Module, dtype: torch.dtype, shapes: Shapes | None = None) -> None:
        self.model, self.dtype, self.shapes = model, dtype, shapes
        self._walk = Walk(model)
        self._sharded: list[FSDPModule] = []
        self._seen: list[tuple[str, nn.Parameter]] | None = None
        self._places: list[int] = []
        self._held: list[tuple[str, Tensor]] | None = None

    def outline(self) -> list[tuple[str, Tensor]]:
        """See :class:`Weights`."""
        found = []
        for name, parameter in self.model.named_parameters():
            if not is_adapter(name) and _is_wanted(name, self.shapes):
                shape = plain_shape(parameter)
                found.append((checkpoint_name(name), torch.empty(shape, dtype=self.dtype, device="meta")))
        return found

    def held(self) -> list[tuple[str, Tensor]] | None:
        """See :class:`Weights`: without adapters, and on one rank. The same list again while nothing has moved."""
        reshard_all(self._sharded)
        parameters = self._walk.parameters()
        if parameters is not self._seen:
            self._sharded = sharded_modules(self._walk.modules())
            reshard_all(self._sharded)
            self._seen = parameters = self._walk.parameters()
        if self.shapes is not None:
            parameters = [(n, p) for n, p in parameters if _is_wanted(n, self.shapes)]
        places = [shard(p).data_ptr() for _, p in parameters]
        if places != self._places:
            self._places, self._held = places, _in_place(parameters)
        return self._held

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """See :func:`iter_weights`."""
        return iter_weights(self.model, self.dtype, self.shapes)


def _is_wanted(name: str, shapes: Shapes | None) -> bool:
    return shapes is None or checkpoint_name(name) in shapes


def _in_place(parameters: list[tuple[str, nn.Parameter]]) -> list[tuple[str, Tensor]] | None:
    found = []
    for name, parameter in parameters:
        whole = None if is_quantized(parameter) or is_adapter(name) else whole_in_place(parameter)
        if whole is None or not whole.is_contiguous():  # an engine would copy it, and keep the copy
            return None
        found.append((checkpoint_name(name), whole))
    return found


@torch.no_grad()
def iter_weights(
    model: PreTrainedModel | nn.Module, dtype: torch.dtype, shapes: Shapes | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield (checkpoint name, full tensor in ``dtype``) for every parameter, in module order, a tied one once.

    With LoRA the names and shapes are the base's and a weight is W + scale B A, made in float32: nothing of the policy
    is written to. A collective where the model is sharded: every rank must run the iterator to its end.

    Args:
        model: perhaps sharded.
        dtype: of what is yielded.
        shapes: leave out what is not among these.

    Raises:
        ValueError: not all LoRA modules that were bound are at work.
    """
    reshard(model)
    adapted = ready_to_merge(model)
    wanted = ((n, p) for n, p in model.named_parameters() if not is_adapter(n) and _is_wanted(n, shapes))
    for chunk in in_chunks(wanted, lambda p: plain_shape(p).numel() * dtype.itemsize):
        layers = [_adapted_layer(adapted, name) for name, _ in chunk]
        plain = [plain_weight(parameter) for _, parameter in chunk]
        # What an adapter is added to is added up as it is, and rounded afterwards.
        kinds = [w.dtype if layer is not None else dtype for w, layer in zip(plain, layers, strict=True)]
        for (name, _), layer, whole in zip(chunk, layers, full_tensors(plain, kinds), strict=True):
            weight = whole if layer is None else merged_weight(layer, whole)
            yield checkpoint_name(name), weight.to(dtype)


def _adapted_layer(adapted: Mapping[str, Any], name: str) -> Any:
    path, _, leaf = name.rpartition(".")
    return adapted.get(path.removesuffix(".base_layer")) if leaf == "weight" else None


_Pair = TypeVar("_Pair", bound=tuple[str, Tensor])


def in_chunks(pairs: Iterable[_Pair], size_of: Callable[[Tensor], int]) -> Iterator[list[_Pair]]:
    """Yield (name, tensor) pairs together, so many that what is made of them takes about 256 MiB at once.

    Args:
        pairs: perhaps made one by one.
        size_of: returns the bytes of what is made of one.
    """
    chunk: list[_Pair] = []
    size = 0
    for pair in pairs:
        chunk.append(pair)
        size += size_of(pair[1])
        if size >= _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


@torch.no_grad()
def weights_mark(model: nn.Module) -> list[tuple[int, int]]:
    """Return (in-place changes that torch counted, sum of the bits) of each parameter's part on this rank.

    It is the same as before while nothing changed the weights, through ``.data`` or otherwise.
    """
    reshard(model)
    parameters = list(model.parameters())
    sums = [local_tensor(p).contiguous().view(_INTEGERS[p.element_size()]).sum(dtype=torch.int64) for p in parameters]
    return list(zip([p._version for p in parameters], torch.stack(sums).tolist(), strict=True))
