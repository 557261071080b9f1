"""Tool use: formats read off chat templates, calls good and bad, and a real fit."""

from typing import Any

import pytest

from lightrl.environments import Done, Episodes, ToolUse, Turn
from lightrl.environments.tool_format import ToolCall, ToolFormat, read_format
from lightrl.types import Prompt
from tests.helpers.environments import Rollouts, chat_tokenizer, chats
from tests.helpers.training import quiet_trainer, tiny_data, tiny_module

USER = "{% for m in messages %}{% if m.role != 'assistant' %}{{ '[' + m.role + ']' + m.content }}{% else %}"
END = "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
QWEN = (
    USER
    + "{{ '[assistant]' }}{% if loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ m.content }}"
    + """{% for c in m.tool_calls %}{{ '<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' }}"""
    + "{{ c.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}{{ '<eos>\n' }}"
    + END
)
LLAMA = (
    USER
    + "{{ '[assistant]' }}{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}"
    + """{{ '{"name": "' + f.name + '", "parameters": ' }}{{ f.arguments | tojson }}{{ '}' }}"""
    + "{% else %}{{ m.content }}{% endif %}{{ '<eos>' }}"
    + END
)
MISTRAL = (
    USER
    + "{% if m.tool_calls %}{{ '[TOOL_CALLS][' }}{% for c in m.tool_calls %}"
    + """{{ '{"name": "' + c.function.name + '", "arguments": ' + (c.function.arguments | tojson) + '}' }}"""
    + "{% endfor %}{{ ']<eos>' }}{% else %}{{ m.content + '<eos>' }}{% endif %}"
    + END
)
XML = USER + "{{ '[assistant]<function=' + m.tool_calls[0].function.name + '>' }}" + END


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


async def later(text: str) -> str:
    """Repeat.

    Args:
        text: What to repeat.
    """
    return text * 2


def turn(text: str) -> Turn:
    return Turn(0, text, text, [5], truncated=False)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (QWEN, ToolFormat("<tool_call>", "name", "arguments")),
        (LLAMA, ToolFormat("", "name", "parameters")),
        (MISTRAL, ToolFormat("[TOOL_CALLS][", "name", "arguments")),
    ],
    ids=["qwen", "llama", "mistral"],
)
def test_the_format_is_read_off_the_template(template: str, expected: ToolFormat) -> None:
    assert read_format(chat_tokenizer(template), ToolUse([add]).tools) == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [(XML, "writes no tool calls as JSON objects"), ("{{ raise_exception('no tools here') }}", "no tools here")],
)
def test_a_template_without_such_calls_is_named(template: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ToolUse([add]).setup(chat_tokenizer(template))


HERMES = ToolFormat("<tool_call>", "name", "arguments")


@pytest.mark.parametrize(
    ("how", "text", "calls"),
    [
        (HERMES, 'so <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', [ToolCall("add", {"a": 1})]),
        (HERMES, '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g"}', [ToolCall("f"), ToolCall("g")]),
        (HERMES, "the answer is {3}", []),
        (HERMES, '<tool_call> {"name": ', [ToolCall("", error="the call is no JSON object")]),
        (HERMES, '<tool_call> {"nom": "f"}', [ToolCall("", error="the call has no 'name'")]),
        (HERMES, '<tool_call> {"name": "f", "arguments": [1]}', [ToolCall("f", error="'arguments' is no JSON object")]),
        (HERMES, '<tool_call> {"name": "f", "arguments": "{\\"a\\": 2}"}', [ToolCall("f", {"a": 2})]),
        pytest.param(HERMES, "<tool_call>" + "[" * 9999, [ToolCall("", error="the call is no JSON object")], id="deep"),
        pytest.param(
            HERMES,
            '<tool_call> {"name": "f", "arguments": {"a": 1%s}}' % ("0" * 5000),
            [ToolCall("", error="the call is no JSON object")],
            id="digits",
        ),
        (
            HERMES,
            '<tool_call>{"name": "f", "arguments": {"a": "<tool_call>{}"}}',
            [ToolCall("f", {"a": "<tool_call>{}"})],
        ),
        (HERMES, "", []),
        (ToolFormat("", "name", "parameters"), ' {"name": "f", "parameters": {}}', [ToolCall("f")]),
        (ToolFormat("", "name", "parameters"), 'I say {"name": "f"}', []),
        (ToolFormat("[C][", "name", "arguments"), '[C][{"name": "f"}, {"name": "g"}]', [ToolCall("f"), ToolCall("g")]),
    ],
)
def test_calls_are_read(how: ToolFormat, text: str, calls: list[ToolCall]) -> None:
    assert how.parse(text) == calls


def test_results_and_errors_go_to_the_model() -> None:
    tools = ToolUse([add], parse=HERMES.parse)
    environment = tools(Prompt([1]))
    call = '<tool_call> {"name": "%s", "arguments": %s} </tool_call>'
    said = "".join(call % pair for pair in (("add", '{"a": 2}'), ("add", '{"a": "x"}'), ("sub", "{}"), ("add", "3")))
    answer = environment.step(turn(said))
    assert [message["role"] for message in answer] == ["tool"] * 4
    results = [message["content"] for message in answer]
    assert results[0] == "3"
    assert results[1].startswith("Error: TypeError")
    assert results[2] == "Error: there is no tool 'sub', only add"
    assert results[3] == "Error: 'arguments' is no JSON object"
    assert environment.step(turn("it is 3")) == Done()


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([], "tools="),
        ([add, add], "two tools have the same name"),
        ([lambda a: a], "type hints and a docstring"),
    ],
)
def test_bad_tools_are_refused(tools: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ToolUse(tools)


def test_tools_through_a_fit_with_a_parser_of_ones_own() -> None:
    """A turn that begins with an odd word calls a tool: what the tiny model says is random."""

    def parse(text: str) -> list[ToolCall]:
        words = [int(word[1:]) for word in text.split() if word[1:].isdigit()]
        if words and words[0] % 2:
            return [ToolCall("add", {"a": words[0]}), ToolCall("later", {"text": "w7 "})]
        return []

    watch = Rollouts()
    data = tiny_data(
        chats(),
        lambda completion, turns: float(len(turns)),
        environment=Episodes(ToolUse([add, later], parse), max_turns=4, max_turn_tokens=3),
        max_completion_tokens=60,
        tokenizer=chat_tokenizer(),
        group_size=4,
    )
    quiet_trainer(callbacks=[watch], max_steps=2).fit(tiny_module(), data)
    rollouts = [r for step in watch.trained for r in step]
    assert {r.turns for r in rollouts} > {1}, "some called a tool and some did not"
    for rollout in rollouts:
        assert rollout.reward == rollout.turns
        heard = [t for t, live in zip(rollout.completion_ids, rollout.loss_mask.tolist(), strict=True) if not live]
        assert (4 in heard) is (rollout.turns > 1), "w4 is the role of a tool in the template"
        assert heard.count(7) == 2 * heard.count(4) / 2, "later says w7 w7 where add says a number"


def test_the_template_is_told_of_the_tools() -> None:
    watch = Rollouts()
    template = "{% if tools %}{{ 'w11 w12 ' }}{% endif %}" + chat_tokenizer().chat_template
    use = Episodes(ToolUse([add], lambda text: []))
    data = tiny_data(chats(), lambda c: float(len(c)), environment=use, tokenizer=chat_tokenizer(template))
    quiet_trainer(callbacks=[watch], max_steps=1).fit(tiny_module(), data)
    assert all(r.prompt_ids[:2] == [11, 12] for r in watch.trained[0])
