"""How a model writes tool calls, read off its chat template.

Only formats that write a call as one JSON object are read (Qwen, Hermes, Llama 3, Mistral and their kin); for others
:class:`~lightrl.environments.ToolUse` takes a parser.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NAME, _KEY, _VALUE = "the_name_of_a_tool", "the_key_of_an_argument", "its value"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that a model wrote."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    """Why it cannot be read; the model is told."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """What a call looks like.

    Example:
        >>> hermes = ToolFormat("<tool_call>", "name", "arguments")
        >>> hermes.parse('Let me see. <tool_call> {"name": "add", "arguments": {"a": 1}} </tool_call>')
        [ToolCall(name='add', arguments={'a': 1}, error=None)]
    """

    marker: str
    """Stands before a call; empty where a call is the whole message."""
    name_key: str
    arguments_key: str

    def parse(self, text: str) -> list[ToolCall]:
        """Return the calls in what a model said, in order; none means that it answered."""
        calls: list[ToolCall] = []
        position = 0
        for start in self._starts(text):
            if start < position:  # inside the call before it, in an argument's text
                continue
            position = start
            while (found := _decode(text, position)) is not None:
                value, position = found
                calls.append(self._call(value))
                following = re.compile(r"\s*,\s*").match(text, position)
                if following is None:
                    break
                position = following.end()
            if position == start:
                calls.append(ToolCall("", error="the call is no JSON object"))
        return calls

    def _starts(self, text: str) -> list[int]:
        if not self.marker:
            return [len(text) - len(text.lstrip())] if text.lstrip().startswith("{") else []
        return [m.end() for m in re.finditer(re.escape(self.marker) + r"\s*", text)]

    def _call(self, value: Any) -> ToolCall:
        name = value.get(self.name_key) if isinstance(value, dict) else None
        if not isinstance(name, str):
            return ToolCall("", error=f"the call has no {self.name_key!r}")
        arguments = value.get(self.arguments_key, {})
        if isinstance(arguments, str):
            found = _decode(arguments, 0)
            arguments = found[0] if found else arguments
        if not isinstance(arguments, dict):
            return ToolCall(name, error=f"{self.arguments_key!r} is no JSON object")
        return ToolCall(name, arguments)


def read_format(tokenizer: PreTrainedTokenizerBase, tools: Sequence[Any]) -> ToolFormat:
    """Have the chat template write a call and see what it looks like.

    Raises:
        ValueError: the template writes no calls, or not as JSON objects.
    """
    asked: Any = [{"role": "user", "content": "."}]
    call = {"id": "call00000", "type": "function", "function": {"name": _NAME, "arguments": {_KEY: _VALUE}}}
    options: dict[str, Any] = {"tools": list(tools), "tokenize": False}
    try:
        befores = [str(tokenizer.apply_chat_template(asked, add_generation_prompt=g, **options)) for g in (True, False)]
        answer = [*asked, {"role": "assistant", "content": "", "tool_calls": [call]}]
        text = str(tokenizer.apply_chat_template(answer, **options))
    except Exception as error:
        raise ValueError(f"the chat template of {tokenizer.name_or_path!r} refuses a tool call: {error}") from error
    shared = max((len(before) for before in befores if text.startswith(before)), default=0)
    for start in reversed([m.start() for m in re.finditer(r"\{", text[: text.find(_NAME) + 1])]):
        found = _decode(text, start)
        keys = _keys(found[0]) if found and start >= shared else None
        if keys is not None:
            said = text[shared:start].split()
            return ToolFormat(said[-1] if said else "", *keys)
    raise ValueError(
        f"the chat template of {tokenizer.name_or_path!r} writes no tool calls as JSON objects: give "
        "ToolUse(tools, parse=...) a function that reads them"
    )


def _keys(value: Any) -> tuple[str, str] | None:
    if not isinstance(value, dict):
        return None
    name = next((key for key, v in value.items() if v == _NAME), None)
    arguments = next((key for key, v in value.items() if _KEY in str(v)), None)
    return None if name is None or arguments is None else (name, arguments)


def _decode(text: str, start: int) -> tuple[Any, int] | None:
    try:
        return json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):  # ValueError: also a number with more digits than Python reads
        return None
