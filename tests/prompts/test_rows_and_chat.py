"""Prompts: what a bad data set says, which ids a prompt becomes, and the order in which rows come."""

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from lightrl.prompts import PromptOrder, ground_truth, load_rows, stop_token_ids, tokenize_prompts

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


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


# --- rows


def test_parquet_with_chat_messages_and_reward_model(tmp_path: Path) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": "hi"}], "reward_model": {"ground_truth": "4"}, "level": 1},
        {"prompt": [{"role": "user", "content": "yo"}], "reward_model": {"ground_truth": "5"}, "level": 2},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert load_rows(str(tmp_path / "a.parquet")) == rows
    assert [ground_truth(r) for r in load_rows(tmp_path / "a.parquet")] == ["4", "5"]


def test_a_folder_name_with_equals_sign_is_no_column(tmp_path: Path) -> None:
    folder = tmp_path / "lr=3"
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist([{"prompt": "hi"}]), folder / "a.parquet")
    assert load_rows(folder / "a.parquet") == [{"prompt": "hi"}]


def test_json_lines_keep_unicode_line_separators(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": "a\u2028b", "answer": "#### 4"}, ensure_ascii=False), "", '{"prompt": "c"}']
    rows = load_rows(write(tmp_path / "a.jsonl", "\n".join(lines) + "\n"))
    assert rows == [{"prompt": "a\u2028b", "answer": "#### 4"}, {"prompt": "c"}]
    assert [ground_truth(r) for r in rows] == ["4", None]


def test_json_array_list_of_strings_and_dataset_are_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    assert load_rows(write(tmp_path / "a.json", '[{"prompt": "a"}]')) == [{"prompt": "a"}]
    assert load_rows(["a", "b"]) == [{"prompt": "a"}, {"prompt": "b"}]
    data = datasets.Dataset.from_list([{"prompt": "a", "answer": 3}]).with_format("torch")
    assert load_rows(data) == [{"prompt": "a", "answer": 3}]
    with pytest.raises(ValueError, match=r"splits \['test', 'train'\].*dataset\['test'\]"):
        load_rows(datasets.DatasetDict({"train": data, "test": data}))


def test_reward_model_may_be_a_json_string() -> None:
    (row,) = load_rows([{"prompt": "a", "reward_model": '{"ground_truth": 7}', "answer": 8}])
    assert row["reward_model"] == {"ground_truth": 7}
    assert ground_truth(row) == 7
    assert ground_truth({"ground_truth": 0, "answer": 8}) == 0


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere/x.parquet", r"nowhere/x\.parquet does not exist"),
        (3, r"cannot read prompts from the prompt data \(int\)"),
        ([], "is empty: it has no rows"),
        ([{"query": "a", "answer": 1}], r"row 0 has no column 'prompt'. Its columns: \['answer', 'query'\]"),
        (["a", {"prompt": "b"}, {"text": "c"}], r"row 2 has no column 'prompt'"),
        (["a", chat("b")], "mixes prompt types: row 0 has a string, row 1 has chat messages"),
        (["a", {"prompt": 5}], r"row 1: the prompt is a int \(5\)"),
        (
            [{"prompt": "a", "answer": "4"}, {"prompt": "b", "answer": 4}],
            "mixes types of ground truth: row 0 has a str",
        ),
        (["a", 5], r"row 1 is a int \(5\)"),
        (["a", "  "], r"row 1: the prompt is empty \('  '\)"),
        ([{"prompt": []}], r"row 0: the prompt is empty \(\[\]\)"),
        ([chat("")], r"row 0: the prompt is empty \(no message has content\)"),
        ([{"prompt": [{"content": "a"}]}], r"row 0: \{'content': 'a'\} is no chat message"),
        ([{"prompt": "a", "reward_model": "4"}], "row 0: reward_model is the string '4', which is no JSON object"),
    ],
)
def test_bad_rows_say_what_and_where(source: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_rows(source)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"prompt": "a"}\n\n{"prompt": \n', r"a\.jsonl, line 3: broken JSON .*'\{\"prompt\": '"),
        ("a.json", b'[{"prompt": "a"},\n{"prompt" 3}]', r"a\.json, line 2: broken JSON"),
        ("a.jsonl", b'{"prompt": "a"}\n{"answer": 1' + b"0" * 5000 + b"}", r"a\.jsonl, line 2: unreadable JSON"),
        ("a.jsonl", b'{"prompt": "a"}\n{"answer":' + b"[" * 99999, r"a\.jsonl, line 2: unreadable JSON"),
        ("a.jsonl", b"\xff\xfe{}", r"a\.jsonl is not UTF-8"),
        ("a.parquet", b"PAR1 no", r"a\.parquet is not a readable parquet file"),
        ("a.csv", b"prompt", r"a\.csv: unknown kind of file '\.csv'\. Use one of \.parquet, \.jsonl, \.json"),
        ("a.jsonl", b"\n", r"a\.jsonl is empty"),
    ],
)
def test_bad_files_say_what_and_where(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_rows(tmp_path / name)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a folder"):
        load_rows(tmp_path)


# --- tokens


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


# --- order


def test_each_epoch_visits_each_row_once_and_differs() -> None:
    order = PromptOrder(10, seed=1)
    epochs = [order.take(10) for _ in range(3)]
    assert all(sorted(e) == list(range(10)) for e in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert PromptOrder(10, seed=2).take(10) != epochs[0]


def test_take_crosses_epochs_and_drops_nothing() -> None:
    whole = PromptOrder(10, seed=1).take(60)
    order = PromptOrder(10, seed=1)
    pieces = [order.take(n) for n in (3, 4, 0, 4, 25, 24)]
    assert [len(p) for p in pieces] == [3, 4, 0, 4, 25, 24]
    assert sum(pieces, []) == whole
    assert [whole.count(i) for i in range(10)] == [6] * 10


def test_unshuffled_order_is_the_rows_own() -> None:
    assert PromptOrder(3, seed=0, shuffle=False).take(7) == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("done", [0, 4, 10, 13])
def test_order_resumes_exactly(done: int) -> None:
    order = PromptOrder(10, seed=1)
    order.take(done)
    state = json.loads(json.dumps(order.state_dict()))
    resumed = PromptOrder(10, seed=5)
    resumed.load_state_dict(state)
    assert resumed.take(25) == order.take(25)
    assert resumed.state_dict() == order.state_dict()


def test_order_of_other_data_is_not_continued() -> None:
    with pytest.raises(ValueError, match="10 prompts and the data set now has 11"):
        PromptOrder(11, seed=1).load_state_dict(PromptOrder(10, seed=1).state_dict())


def test_order_leaves_global_random_state_alone() -> None:
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    PromptOrder(10, seed=1).take(35)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before


@pytest.mark.parametrize(("arguments", "message"), [((0, 1), "num_prompts=0"), ((3, -1), "seed=-1")])
def test_bad_order_arguments(arguments: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PromptOrder(*arguments)
    with pytest.raises(ValueError, match=r"take\(-1\)"):
        PromptOrder(3, 1).take(-1)
