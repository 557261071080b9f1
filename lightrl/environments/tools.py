"""Tool use: the model calls functions in its own format until it answers without a call."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from lightrl.environments.base import Done, Turn
from lightrl.environments.tool_format import ToolCall, read_format
from lightrl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Parser = Callable[[str], Sequence[ToolCall]]


class ToolUse:
    """An environment of tools: a turn with calls is answered with their results, one without ends the episode.

    Prompts have to be chats. The chat template tells the model of the tools, and how it writes a call is read off the
    template too. What a tool raises goes to the model as text, as does a call that cannot be read.

    Args:
        tools: functions, plain or async, with type hints and a docstring that has an ``Args:`` section.
        parse: reads the calls in what the model said, special tokens included; None: as its chat template writes them.

    Raises:
        ValueError: there are no tools, two have the same name, or a function does not describe itself.

    Attributes:
        tools: their JSON schemas, for the chat template.
    """

    def __init__(self, tools: Sequence[Callable[..., Any]], parse: Parser | None = None) -> None:
        from transformers.utils.chat_template_utils import get_json_schema

        if not tools:
            raise ValueError("tools=[]: give at least one function")
        self.functions = {tool.__name__: tool for tool in tools}
        if len(self.functions) < len(tools):
            raise ValueError(f"two tools have the same name: {[tool.__name__ for tool in tools]}")
        try:
            self.tools = [get_json_schema(tool) for tool in tools]
        except Exception as error:
            raise ValueError(f"a tool needs type hints and a docstring with an Args: section: {error}") from error
        self._given = self.parse = parse

    def setup(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Read the tokenizer's tool format; raises ValueError where it cannot be read."""
        self.parse = self._given or read_format(tokenizer, self.tools).parse

    def __call__(self, prompt: Prompt) -> ToolUse:
        """Return itself: episodes have no state of their own."""
        return self

    def step(self, turn: Turn) -> Any:
        """Run the calls of a turn, one after the other; end the episode where there is none."""
        assert self.parse is not None, "setup has not run"
        calls = list(self.parse(turn.raw_text))
        if not calls:
            return Done()
        if any(inspect.iscoroutinefunction(self.functions.get(call.name)) for call in calls):
            return self._run_async(calls)
        return [_message(call, self._run(call)) for call in calls]

    async def _run_async(self, calls: list[ToolCall]) -> list[dict[str, str]]:
        return [_message(call, await _awaited(await asyncio.to_thread(self._run, call))) for call in calls]

    def _run(self, call: ToolCall) -> Any:
        tool = self.functions.get(call.name)
        if call.error is not None:
            return f"Error: {call.error}"
        if tool is None:
            return f"Error: there is no tool {call.name!r}, only {', '.join(self.functions)}"
        try:
            return tool(**call.arguments)
        except Exception as error:
            return _told(error)


async def _awaited(result: Any | Coroutine[Any, Any, Any]) -> Any:
    try:
        return await result if inspect.isawaitable(result) else result
    except Exception as error:
        return _told(error)


def _told(error: Exception) -> str:
    return f"Error: {type(error).__name__}: {error}"


def _message(call: ToolCall, result: Any) -> dict[str, str]:
    return {"role": "tool", "name": call.name, "tool_call_id": "call00000", "content": str(result)}
