"""A trained policy as a Hugging Face folder, which ``vllm serve`` and ``from_pretrained`` load as it is."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightrl.checkpoints import whole_or_nothing
from lightrl.distributed import rank
from lightrl.rewards.base import import_callable
from lightrl.weights.source import iter_weights

if TYPE_CHECKING:
    from lightrl.module import RLModule

_SHARD_BYTES = 5 * 2**30


def export(
    source: RLModule | str | Path,
    folder: str | Path,
    *,
    dtype: str | None = None,
    module_class: type[RLModule] | None = None,
    **hyperparameters: Any,
) -> Path:
    """Write weights (safetensors, LoRA merged), configuration, generation configuration, tokenizer and chat template.

    A model that is in ``folder`` already is replaced, once all is written.

    Args:
        source: a module, of which all ranks call this together, or the path of a checkpoint.
        folder: to write.
        dtype: of the weights, such as ``"bfloat16"``; None: the policy's own.
        module_class: of the checkpoint's module; None: ``RLModule``.
        hyperparameters: arguments of the module that the checkpoint does not have, such as a ``model`` given as object.

    Returns:
        The folder.

    Raises:
        ValueError: ``dtype`` is none of torch's floating-point types, or ``folder`` holds something else than a model.
        OSError: it cannot be written.
    """
    kind = None if dtype is None else getattr(torch, dtype, None)
    if dtype is not None and not (isinstance(kind, torch.dtype) and kind.is_floating_point):
        raise ValueError(f"dtype={dtype!r} is no floating-point type of torch: take bfloat16, float16 or float32")
    folder = Path(folder)
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "config.json").is_file():
        raise ValueError(f"{folder} holds something else than a model, which would be removed: name another folder")
    if isinstance(source, (str, Path)):
        from lightrl.module import RLModule

        module: Any = (module_class or RLModule).load_from_checkpoint(source, map_location="cpu", **hyperparameters)
    else:
        module = source
    policy: Any = module.policy
    kind = kind or next(p.dtype for p in policy.parameters() if p.is_floating_point())
    with whole_or_nothing(folder, "the export") as partial:
        if rank() == 0:
            partial.mkdir()
        _write_weights(iter_weights(policy, kind), partial)
        if rank() == 0:
            _write_the_rest(module, partial, kind)
    return folder


def _write_weights(weights: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Write one file, or several with an index; only one of them is in memory at a time."""
    from safetensors.torch import save_file

    shards: list[list[str]] = []
    held: dict[str, Tensor] = {}
    total = size = 0

    def flush() -> None:
        shards.append(list(held))
        save_file(held, folder / f"model-{len(shards):05d}.safetensors", metadata={"format": "pt"})
        held.clear()

    for name, tensor in weights:
        if rank():  # gathering them takes all ranks
            continue
        if held and size + tensor.nbytes > _SHARD_BYTES:
            flush()
            size = 0
        held[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size, total = size + tensor.nbytes, total + tensor.nbytes
    if rank():
        return
    flush()
    if len(shards) == 1:
        (folder / "model-00001.safetensors").rename(folder / "model.safetensors")
        return
    places = {name: f"model-{i:05d}.safetensors" for i, names in enumerate(shards, 1) for name in names}
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _write_the_rest(module: Any, folder: Path, dtype: torch.dtype) -> None:
    from lightrl.engines.vllm import engine_config

    config = engine_config(module.policy)
    config.dtype = dtype
    config.save_pretrained(folder)
    module.policy.generation_config.save_pretrained(folder)
    tokenizer = module.trainer.datamodule.tokenizer if _has_tokenizer(module) else module.tokenizer
    tokenizer.save_pretrained(folder)


def _has_tokenizer(module: Any) -> bool:
    return getattr(getattr(module._trainer, "datamodule", None), "tokenizer", None) is not None


def main(argv: list[str] | None = None) -> None:
    """Export a checkpoint from the command line."""
    parser = argparse.ArgumentParser(prog="python -m lightrl.export", description=__doc__)
    parser.add_argument("checkpoint", help="file or folder that training saved")
    parser.add_argument("folder", help="to write")
    parser.add_argument("--dtype", help="of the weights, such as bfloat16; the policy's own by default")
    parser.add_argument("--module", default="lightrl.RLModule", help="import path of the module's class")
    args = parser.parse_args(argv)
    try:
        module_class: Any = import_callable(args.module, "--module")
        print(export(args.checkpoint, args.folder, dtype=args.dtype, module_class=module_class))
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
