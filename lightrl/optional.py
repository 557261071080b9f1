"""Packages that lightrl works without: imported where they are needed, with one error where they are missing."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

_INSTALL = {
    "bitsandbytes": "leave it out, or run on an NVIDIA GPU with bitsandbytes (pip install bitsandbytes)",
    "datasets": "pip install 'lightrl-trainer[datasets]'",
    "math_verify": "pip install 'lightrl-trainer[math]'",
    "peft": "pip install 'lightrl-trainer[lora]'",
    "ray": "pip install 'lightrl-trainer[ray]'; pool='local' works without it",
    "reasoning_gym": "pip install 'lightrl-trainer[gym]'",
    "vllm": "pip install 'lightrl-trainer[vllm]' on a GPU machine or 'lightrl-trainer[cpu]' on a CPU; "
    "strategy='colocated_hf' works without it",
}


def import_optional(module: str, wanted: str) -> Any:
    """Import an optional package, or a module of one, for ``wanted``, as the user knows it.

    Raises:
        ValueError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise not_installed(module, wanted, error) from error


def require_optional(package: str, wanted: str) -> None:
    """Raise ValueError unless an optional package is installed; it is not imported."""
    if importlib.util.find_spec(package) is None:
        raise not_installed(package, wanted)


def not_installed(module: str, wanted: str, error: ImportError | None = None) -> ValueError:
    """Return the error that says what to install."""
    package = module.partition(".")[0]
    cause = f" ({error})" if error else ""
    return ValueError(f"{wanted} needs {package}, which is not installed here: {_INSTALL[package]}{cause}")
