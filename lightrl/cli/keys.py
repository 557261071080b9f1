"""Which keys of a config file or options nobody knows, and which ones were meant."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import yaml

CLASS_KEYS = {"class_path", "init_args", "dict_kwargs"}
_ELSEWHERE = {
    "learning_rate": "lr",
    "batch_size": "prompts_per_step",
    "num_generations": "group_size",
    "max_completion_length": "max_completion_tokens",
    "max_new_tokens": "max_completion_tokens",
    "beta": "kl_coef",
    "reward_funcs": "reward",
}
"""What other libraries call an argument of ours that is spelt quite differently."""


@dataclass(frozen=True)
class _Unknown:
    key: str
    siblings: tuple[str, ...]
    """Keys that the same place does take."""


def unknown_keys(arguments: list[str], known: set[str], model: type) -> list[str]:
    """Return a sentence for each unknown key of the config files and options among ``arguments``, with the nearest one.

    Args:
        arguments: what was typed, without the command's name.
        known: dotted keys of everything that has a fixed place, such as ``trainer.max_steps``.
        model: the class whose arguments lie below ``model`` unless a ``class_path`` says otherwise.
    """
    found: list[tuple[str, _Unknown]] = []
    chosen: Any = model
    for path in _values(arguments, "-c", "--config"):
        if isinstance(config := _config(path), Mapping):
            found += [(f" in {path}", unknown) for unknown in _in_section(config, known, model)]
            section = config.get("model")
            if isinstance(section, Mapping) and "class_path" in section:
                chosen = _imported(str(section["class_path"]))
    for path in _values(arguments, "--model", "--model.class_path"):
        chosen = _imported(path)
    keys = known | {"model.class_path"} | {f"model.{name}" for name in parameters(chosen or model)}
    found += [("", unknown) for unknown in _in_options(arguments, keys)]
    return [f"no {'key' if where else 'option'} {u.key!r}{where}{_meant(u, keys)}" for where, u in found]


def parameters(cls: Any) -> set[str]:
    """Return the names of what a class takes, those that it passes on to its bases included."""
    if isinstance(cls, _Unknown):
        return set()
    functions = [vars(base).get("__init__") for base in cls.__mro__] if isinstance(cls, type) else [cls]
    names: set[str] = set()
    for function in filter(None, functions):
        signature = inspect.signature(function).parameters.values()
        names |= {p.name for p in signature if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        if not any(p.kind is p.VAR_KEYWORD for p in signature):
            break
    return names - {"self"}


def _config(path: str) -> Any:
    """Return what a file holds; None where there is none, or no YAML in it, which is another mistake."""
    try:
        return yaml.safe_load(Path(path).read_text()) if Path(path).is_file() else None
    except yaml.YAMLError:
        return None


def _values(arguments: list[str], *options: str) -> Iterator[str]:
    """Yield what follows any of these options."""
    for argument, following in zip_longest(arguments, arguments[1:], fillvalue=""):
        name, equals, value = argument.partition("=")
        if name in options:
            yield value if equals else following


def _in_section(section: Mapping[str, Any], known: set[str], model: type, prefix: str = "") -> Iterator[_Unknown]:
    for name, value in section.items():
        key = f"{prefix}{name}"
        below = {k for k in known if k.startswith(f"{key}.")}
        if key not in known and not below:
            yield _Unknown(key, tuple(k for k in known if k.startswith(prefix) and "." not in k[len(prefix) :]))
        elif key == "model":
            yield from _in_class(value, key, model)
        elif below and isinstance(value, Mapping):
            yield from _in_section(value, known, model, f"{key}.")
        else:
            yield from _in_value(value, key)


def _in_value(value: Any, key: str) -> Iterator[_Unknown]:
    """Look into a value for classes that it configures."""
    if isinstance(value, list):
        for i, item in enumerate(value):
            yield from _in_value(item, f"{key}[{i}]")
    elif isinstance(value, Mapping) and "class_path" in value:
        yield from _in_class(value, key, None)


def _in_class(value: Any, key: str, default: type | None) -> Iterator[_Unknown]:
    if not isinstance(value, Mapping):
        return
    named = "class_path" in value
    cls = _imported(str(value["class_path"])) if named else default
    if isinstance(cls, _Unknown):
        yield cls
        return
    if cls is None:  # a name without a module: jsonargparse knows more of those
        return
    arguments, below = (value.get("init_args") or {}, f"{key}.init_args.") if named else (value, f"{key}.")
    if named:
        yield from (_Unknown(f"{key}.{n}", tuple(f"{key}.{k}" for k in CLASS_KEYS)) for n in set(value) - CLASS_KEYS)
    takes = parameters(cls)
    for name, argument in arguments.items():
        if name not in takes:
            yield _Unknown(f"{below}{name}", tuple(f"{below}{n}" for n in takes))
        else:
            yield from _in_value(argument, f"{below}{name}")


def _imported(path: str) -> Any:
    """Return what an import path leads to; None where it is no path; an unknown key where its last name is wrong."""
    module_name, _, name = path.rpartition(".")
    if not module_name:
        return None
    try:
        module = importlib.import_module(module_name)
    except ImportError:
        return None
    if not hasattr(module, name):
        return _Unknown(path, tuple(f"{module_name}.{n}" for n in dir(module) if not n.startswith("_")))
    return getattr(module, name)


def _in_options(arguments: list[str], keys: set[str]) -> Iterator[_Unknown]:
    for option in arguments:
        name = option.removeprefix("--").partition("=")[0].rstrip("+")
        name = name.replace(".init_args.", ".")
        ends = {k for k in keys if not any(other.startswith(f"{k}.") for other in keys)}
        nested = any(name.startswith(f"{k}.") for k in ends)  # of a class that another option chose
        if option.startswith("--") and not nested and not any(f"{k}.".startswith(f"{name}.") for k in keys):
            yield _Unknown(name, tuple(keys))


def _meant(unknown: _Unknown, keys: Iterable[str]) -> str:
    """Return the nearest key: a sibling that is spelt like it, else the same name elsewhere, else nothing."""
    nearest = difflib.get_close_matches(unknown.key, unknown.siblings, n=1, cutoff=0.75)
    leaf = unknown.key.rpartition(".")[2]
    leaf = _ELSEWHERE.get(leaf, leaf)
    same = sorted(k for k in keys if k.rpartition(".")[2] == leaf)
    close = _by_leaf(leaf, unknown.siblings)
    choice = next(iter([*(same if not close else []), *close, *nearest]), None)
    return f"; did you mean {choice!r}?" if choice else ". `--print_config` shows every key"


def _by_leaf(leaf: str, keys: Iterable[str]) -> list[str]:
    leaves = {k.rpartition(".")[2]: k for k in keys}
    return [leaves[name] for name in difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.6)]
