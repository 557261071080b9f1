"""Prompts become tokens: which ids a prompt becomes, how long it may be, and what stops a completion."""

from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from lightrl.prompts import load_rows, stop_token_ids, tokenize_prompts

SPECIAL = ["<bos>", "<eos>", "<pad>", "<system>", "<user>", "<assistant>", "<end>"]
LETTERS = "abcdefghijklmnopqrstuvwxyz ?"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ '<' + m['role'] + '>' }}{{ m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{{ 'think' if thinking else '' }}{% endif %}"
)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *LETTERS])}
    base = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    base.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    base.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    base.decoder = decoders.Fuse()
    base.add_special_tokens(SPECIAL)
    made = PreTrainedTokenizerFast(
        tokenizer_object=base, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", name_or_path="tiny"
    )
    made.chat_template = TEMPLATE
    return made


def chat(text: str, system: str | None = None) -> dict[str, Any]:
    start = [] if system is None else [{"role": "system", "content": system}]
    return {"prompt": [*start, {"role": "user", "content": text}]}


def test_b19_one_bos_whatever_the_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    bos = tokenizer.bos_token_id
    (prompt,) = tokenize_prompts([chat("hi", system="be kind")], tokenizer, max_prompt_tokens=None)
    assert prompt.token_ids.count(bos) == 1
    assert prompt.token_ids[0] == bos
    assert prompt.text == "<bos><system>be kind<end><user>hi<end><assistant>"
    assert tokenizer.decode(prompt.token_ids) == prompt.text
    reference = tokenizer.apply_chat_template(chat("hi", system="be kind")["prompt"], add_generation_prompt=True)
    assert prompt.token_ids == reference["input_ids"]

    plain = tokenize_prompts([{"prompt": "hi"}, {"prompt": prompt.text}], tokenizer, max_prompt_tokens=None)
    assert tokenizer.decode(plain[0].token_ids) == "<bos>hi"
    assert plain[1].token_ids == prompt.token_ids, "text that is already rendered is not templated again"


def test_system_prompt_and_template_arguments(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [chat("a"), chat("b", system="mine")]
    prompts = tokenize_prompts(
        rows, tokenizer, max_prompt_tokens=None, system_prompt="theirs", template_kwargs={"thinking": True}
    )
    assert [p.text for p in prompts] == [
        "<bos><system>theirs<end><user>a<end><assistant>think",
        "<bos><system>mine<end><user>b<end><assistant>think",
    ]
    assert rows[0] == chat("a"), "the rows are left as they were"


def test_columns_and_ground_truth_travel_with_the_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = load_rows([{"prompt": "a", "ground_truth": 4, "level": 2}])
    (prompt,) = tokenize_prompts(rows, tokenizer, max_prompt_tokens=None)
    assert (prompt.ground_truth, prompt.columns, prompt.index) == (4, rows[0], 0)


def test_absent_message_keys_stay_absent(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = "{% for m in messages %}{{ 'n' if m.name is defined else 'x' }}{% endfor %}"
    rows = [{"prompt": [{"role": "user", "content": "a", "name": None}, {"role": "user", "content": "a", "name": "b"}]}]
    assert tokenize_prompts(rows, tokenizer, max_prompt_tokens=None)[0].text == "xn"


def test_b20_long_prompts_are_refused_or_dropped_whole(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [chat("ab"), chat("abc", system="xyz"), chat("c")]  # 6, 12 and 5 tokens
    lengths = [len(p.token_ids) for p in tokenize_prompts(rows, tokenizer, max_prompt_tokens=12)]
    assert lengths == [6, 12, 5]
    facts = r"1 of 3 prompts .* max_prompt_tokens=8 \(the longest has 12 tokens; the first is row 1, 12 tokens\)"
    with pytest.raises(ValueError, match=facts):
        tokenize_prompts(rows, tokenizer, max_prompt_tokens=8)
    with pytest.warns(UserWarning, match=facts):
        kept = tokenize_prompts(rows, tokenizer, max_prompt_tokens=8, on_long_prompt="drop")
    assert [p.index for p in kept] == [0, 2]
    first, last = tokenizer.convert_tokens_to_ids(["<bos>", "<assistant>"])
    assert all((p.token_ids[0], p.token_ids[-1]) == (first, last) for p in kept)
    with pytest.raises(ValueError, match="3 of 3 .* so none is left"):
        tokenize_prompts(rows, tokenizer, max_prompt_tokens=4, on_long_prompt="drop")


def test_the_tokenizers_own_truncation_is_off(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.backend_tokenizer.enable_truncation(max_length=4)
    tokenizer.backend_tokenizer.enable_padding(length=50)
    (prompt,) = tokenize_prompts([{"prompt": "abcdefgh"}], tokenizer, max_prompt_tokens=None)
    assert len(prompt.token_ids) == 9


@pytest.mark.parametrize(
    ("rows", "arguments", "message"),
    [
        ([chat("a"), {"prompt": [{"role": "tool", "content": "a"}]}], {}, "row 1: the chat template of 'tiny' refuses"),
        ([{"prompt": "a"}], {"system_prompt": "b"}, "system_prompt='b' .* belong to chat messages"),
        ([chat("a")], {"template_kwargs": {"tokenize": True}}, r"template_kwargs sets \['tokenize'\]"),
        ([chat("a")], {"on_long_prompt": "cut"}, "on_long_prompt='cut'"),
        ([chat("a")], {"max_prompt_tokens": 0}, "max_prompt_tokens=0"),
        ([], {}, "no rows"),
    ],
)
def test_bad_tokenise_arguments(
    tokenizer: PreTrainedTokenizerFast, rows: list[Any], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        tokenize_prompts(rows, tokenizer, **({"max_prompt_tokens": 99} | arguments))


def test_chat_messages_without_a_template(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"'tiny' has no chat template\. Use an instruct model"):
        tokenize_prompts([chat("a")], tokenizer, max_prompt_tokens=None)


def test_a_prompt_without_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = "{{ messages[0].content if messages[0].content != 'a' else '' }}"
    with pytest.raises(ValueError, match="row 1: the tokenizer makes no token"):
        tokenize_prompts([chat("b"), chat("a")], tokenizer, max_prompt_tokens=None)


def owner(eos: Any) -> Any:
    return SimpleNamespace(eos_token_id=eos)


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ((1, [1, 106], None), (1, 106)),
        ((None, [2], None), (2,)),
        ((0, None, None), (0,)),
        ((9, [3, 5], 0), (0, 3, 5, 9)),
    ],
)
def test_b17_stop_ids_are_the_union(ids: tuple[Any, Any, Any], expected: tuple[int, ...]) -> None:
    assert stop_token_ids(*map(owner, ids)) == expected


def test_b17_nothing_that_stops_is_an_error() -> None:
    assert stop_token_ids(owner(4), None, None) == (4,)
    with pytest.raises(ValueError, match="nothing stops a completion"):
        stop_token_ids(owner(None), None, owner([]))


def test_pad_equal_to_eos_changes_no_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [{"prompt": "ab"}, {"prompt": "abcdef<eos>"}]
    before = [p.token_ids for p in tokenize_prompts(rows, tokenizer, max_prompt_tokens=None)]
    tokenizer.pad_token = "<eos>"
    assert [p.token_ids for p in tokenize_prompts(rows, tokenizer, max_prompt_tokens=None)] == before
