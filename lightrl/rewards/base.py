"""What a reward is: any callable that scores a completion, with a name and a weight."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import numbers
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from lightrl.arguments import nearest

RewardFunction = Callable[..., Any]
"""``reward(completion, ground_truth, **columns) -> float | None``, batched if it takes ``completions``, maybe async."""

RewardLike = str | RewardFunction
# Functions last: jsonargparse saves a value as the first kind that takes it, and a function is taken from anything.
RewardSpec = Mapping[str, tuple[RewardLike, float] | RewardLike] | Sequence[RewardLike] | RewardLike


VERL_COMPLETION = "solution_str"
"""A function with this parameter is verl's ``compute_score(data_source, solution_str, ground_truth, extra_info)``."""


@dataclass(frozen=True, slots=True)
class RewardTerm:
    """One reward function with its place in the sum."""

    name: str
    """Its metric is ``reward/<name>``."""
    function: RewardFunction
    weight: float
    """Factor in the weighted sum."""
    batched: bool
    """It has a parameter ``completions`` and gets lists."""
    asynchronous: bool
    first: str
    """Name of the parameter that takes the completion."""
    second: str | None
    """Second positional parameter without default: it takes the ground truth, unless it is named after a column."""
    by_name: dict[str, bool]
    """Other parameters, and whether each is required."""
    takes_all: bool
    """It has ``**kwargs`` and gets every column."""

    def compares(self, columns: Collection[str]) -> bool:
        """Whether it takes a ground truth: under that name, or as the second argument if that is no column."""
        taken = {self.second} if self.second is not None else {name for name, needed in self.by_name.items() if needed}
        truths = {"ground_truth", "ground_truths"}
        return bool(taken & truths) or (self.second is not None and self.second not in {"completion_ids", *columns})

    def bind(self, completion: str, ground_truth: Any, columns: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of a call for one completion.

        Raises:
            ValueError: If a required parameter is no column.
        """
        if self.first == VERL_COMPLETION:  # it goes by name: it is not the first
            return [], self._named({"extra_info": {}} | dict(columns) | {VERL_COMPLETION: completion})
        args = [completion]
        if self.second is not None:
            args.append(columns.get(self.second, ground_truth))
        kwargs = self._named(columns)
        kwargs.pop(self.first, None)
        kwargs.pop(self.second or self.first, None)
        return args, kwargs

    def bind_batch(self, columns: Mapping[str, list[Any]]) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of a call for all completions; everything goes by name.

        Raises:
            ValueError: If a required parameter is no column.
        """
        return [], self._named(columns)

    def _named(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        for name, required in self.by_name.items():
            if required and name not in columns:
                raise ValueError(
                    f"reward {self.name!r} wants {name!r}, which is no column. There are: {sorted(columns)}. "
                    "Rename the parameter or give it a default."
                )
        if self.takes_all:
            return dict(columns)
        return {name: columns[name] for name in self.by_name if name in columns}


def make_terms(rewards: RewardSpec, weights: Sequence[float] | None = None) -> list[RewardTerm]:
    """Turn what a user gave as reward into terms.

    Args:
        rewards: A function, an import path (``"package.module:function"`` or ``"package.module.function"``), a list of
            those, or a mapping of name to one of those or to ``(reward, weight)``.
        weights: One weight for each reward of a list; 1 where not given.

    Raises:
        ValueError: If there is no reward, a path does not lead to a callable, or the weights do not fit.
    """
    named = _named_rewards(rewards)
    if not named:
        raise ValueError("there is no reward: give at least one function.")
    if weights is not None:
        if len(weights) != len(named):
            raise ValueError(f"{len(named)} rewards and {len(weights)} weights ({list(weights)}): give one for each.")
        if any(isinstance(r, tuple) for _, r in named):
            raise ValueError("weights are given twice: in the mapping and as weights=. Give them once.")
        named = [(name, (reward, weight)) for (name, reward), weight in zip(named, weights, strict=True)]
    terms: list[RewardTerm] = []
    for name, reward in named:
        taken = {term.name for term in terms}
        terms.append(_make_term(name, reward, taken))
    return terms


def _named_rewards(rewards: RewardSpec) -> list[tuple[str | None, Any]]:
    if isinstance(rewards, Mapping):
        if set(rewards) == {"class_path"}:  # a config file's class without arguments, which looks like one
            return [(None, import_reward(str(rewards["class_path"]))())]
        return list(rewards.items())
    if isinstance(rewards, list | tuple):
        return [(None, reward) for reward in rewards]
    return [(None, rewards)]


def _make_term(name: str | None, reward: Any, taken: set[str]) -> RewardTerm:
    reward, weight = reward if isinstance(reward, tuple) and len(reward) == 2 else (reward, 1.0)
    function: Any = import_reward(reward) if isinstance(reward, str) else reward
    if not callable(function) or inspect.isclass(function):
        what = f"the class {function.__name__}" if inspect.isclass(function) else repr(function)
        raise ValueError(
            f"{what} is no reward: give a function or an object with __call__ (an instance, not its class)."
        )
    name = name or _unused_name(function, taken)
    if isinstance(weight, bool) or not isinstance(weight, numbers.Real) or not math.isfinite(weight):
        raise ValueError(f"the weight of reward {name!r} is {weight!r}: it must be a finite number.")
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError as error:
        raise ValueError(f"reward {name!r} has no readable signature: wrap it in a def.") from error
    asynchronous = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(function.__call__)
    return _from_signature(name, function, float(weight), asynchronous, parameters)


def _from_signature(
    name: str, function: RewardFunction, weight: float, asynchronous: bool, parameters: list[inspect.Parameter]
) -> RewardTerm:
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    batched = any(p.name == "completions" for p in named)
    if not batched and any(p.name == VERL_COMPLETION for p in named):
        by_name = {p.name: p.default is p.empty for p in named}
        return RewardTerm(name, function, weight, False, asynchronous, VERL_COMPLETION, None, by_name, takes_all)
    positional = [] if batched else [p for p in named if p.kind is not p.KEYWORD_ONLY][:2]
    if not batched and not positional:
        raise ValueError(
            f"reward {name!r} takes no completion: its first parameter must be completion (or completions)."
        )
    second = next((p.name for p in positional[1:] if p.default is p.empty), None)
    by_name = {
        p.name: p.default is p.empty for p in named if p.name != second and (batched or p.name != positional[0].name)
    }
    return RewardTerm(
        name=name,
        function=function,
        weight=weight,
        batched=batched,
        asynchronous=asynchronous,
        first="completions" if batched else positional[0].name,
        second=second,
        by_name=by_name,
        takes_all=takes_all,
    )


def _unused_name(function: Any, taken: set[str]) -> str:
    inner = getattr(function, "func", function)  # functools.partial
    base = str(getattr(inner, "__name__", type(inner).__name__)).strip("<>")
    name, n = base, 1
    while name in taken:
        n += 1
        name = f"{base}_{n}"
    return name


def import_reward(path: str) -> RewardFunction:
    """Import a reward; see :func:`import_callable`."""
    return import_callable(path, "reward")


def import_callable(path: str, what: str) -> Callable[..., Any]:
    """Import ``"package.module:function"``, ``"package.module.function"`` or ``"folder/file.py:function"``.

    Args:
        path: where it is.
        what: what it is for, for errors.

    Raises:
        ValueError: If the path has no module part, or there is no such module, file or attribute.
    """
    module_name, _, attribute = path.rpartition(":" if ":" in path else ".")
    if not module_name or not attribute or path.endswith(".py"):
        raise ValueError(f"{what} {path!r} is no import path: write 'package.module:function' or 'file.py:function'.")
    found: Any = _file(module_name, path, what) if module_name.endswith(".py") else _module(module_name, path, what)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{what} {path!r}: {module_name!r} has no {part!r}{nearest(part, dir(found))}")
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


def _module(name: str, path: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # A module that is there and misses one of its own imports is another fault, with its own message.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(
            f"{what} {path!r}: there is no module {error.name!r}. Check the path, and that its folder is on PYTHONPATH."
        ) from error


def _file(name: str, path: str, what: str) -> ModuleType:
    if not Path(name).is_file():
        raise ValueError(f"{what} {path!r}: there is no file {name!r} (working directory: {Path.cwd()}).")
    spec = importlib.util.spec_from_file_location(f"lightrl_file_{Path(name).stem}", name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look themselves up there
    spec.loader.exec_module(module)
    return module


def check_value(value: Any) -> float | None:
    """Return a reward as a float, or None where the function abstained.

    Raises:
        TypeError: If it is neither None nor one number (bool and 0-d arrays and tensors are numbers).
        ValueError: If it is NaN or infinite.
    """
    if isinstance(value, Mapping) and "score" in value:  # verl's functions may return more than the score
        value = value["score"]
    if value is None:
        return None
    if not isinstance(value, numbers.Real) and getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, numbers.Real):
        shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
        raise TypeError(f"a {type(value).__name__}{shape}: {shorten(value)}")
    try:
        number = float(value)
    except OverflowError as error:  # an int of more than 308 digits
        raise ValueError("a number beyond what a float holds") from error
    if not math.isfinite(number):
        raise ValueError(f"{number}")
    return number


def check_batch(values: Any, n: int) -> list[Any]:
    """Return the n values of a batched reward as a list.

    Raises:
        TypeError: If it is no list, tuple or 1-d array of n values.
    """
    shape = getattr(values, "shape", None)
    if shape is not None and len(shape) == 1:
        values = values.tolist()
    elif shape is not None:
        raise TypeError(f"a {type(values).__name__} of shape {tuple(shape)}")
    if not isinstance(values, list | tuple):
        raise TypeError(f"a {type(values).__name__}: {shorten(values)}")
    if len(values) != n:
        raise TypeError(f"{len(values)} values")
    return list(values)


def shorten(value: Any, limit: int = 200) -> str:
    """Return ``repr(value)``, its middle left out where it is longer than ``limit`` characters."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit // 2]}...{text[-limit // 2 :]}"
