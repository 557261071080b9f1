"""The demo's model, data, reward and picture."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.tensorboard import SummaryWriter
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from examples.tiny.curve import draw_curve
from examples.tiny.task import DIGITS, TinyTask, make_model, make_tokenizer, reward, split_triples, write_task
from lightrl.report import read_scalars


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> TinyTask:
    return write_task(tmp_path_factory.mktemp("tiny"))


def digests(folder: Path) -> dict[str, str]:
    files = [p for p in folder.rglob("*") if p.is_file()]
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def chat_ids(tokenizer, content: str) -> list[int]:
    messages = [{"role": "user", "content": content}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def test_train_and_test_share_no_prompt_and_cover_all_triples():
    train, test = split_triples()
    assert not set(train) & set(test)
    assert len(set(train)) + len(test) == 1000
    assert len(test) == len(set(test)) == pytest.approx(200, abs=5)


def test_every_answer_is_trained_on_equally_often():
    train, _ = split_triples()
    assert Counter(max(t.split()) for t in train) == dict.fromkeys(DIGITS, 220)


def test_parquet_rows_are_chat_messages_with_the_largest_digit_as_ground_truth(task):
    for path in (task.train, task.test):
        for row in pq.read_table(path).to_pylist():
            (message,) = row["prompt"]
            assert message["role"] == "user"
            assert row["reward_model"] == {"ground_truth": max(message["content"].split())}


def test_two_folders_of_one_seed_hold_the_same_bytes(task, tmp_path):
    assert digests(write_task(tmp_path).model_dir.parent) == digests(task.model_dir.parent)


def test_other_seed_gives_another_model_and_another_split():
    assert not torch.equal(make_model(0).lm_head.weight, make_model(1).lm_head.weight)
    assert set(split_triples(0)[1]) != set(split_triples(1)[1])


def test_second_call_writes_nothing(tmp_path):
    folder = write_task(tmp_path).model_dir.parent
    times = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    write_task(tmp_path)
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*")} == times


@pytest.mark.parametrize("damage", ["missing", "cut", "unfinished"])
def test_half_written_folder_is_made_again(task, tmp_path, damage):
    again = write_task(tmp_path)
    weights = again.model_dir / "model.safetensors"
    if damage == "missing":
        weights.unlink()
    elif damage == "cut":
        weights.write_bytes(weights.read_bytes()[:1000])
    else:
        (again.model_dir.parent / "task.json").unlink()
    assert digests(write_task(tmp_path).model_dir.parent) == digests(task.model_dir.parent)


def test_making_the_model_leaves_the_random_state_alone():
    before = torch.get_rng_state()
    make_model()
    assert torch.equal(torch.get_rng_state(), before)


def test_checkpoint_loads_with_its_tokenizer_and_generation_config(task):
    tokenizer = AutoTokenizer.from_pretrained(task.model_dir)
    model = AutoModelForCausalLM.from_pretrained(task.model_dir)
    generation = GenerationConfig.from_pretrained(task.model_dir)
    assert model.config.vocab_size == len(tokenizer)
    assert generation.eos_token_id == model.config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)


def test_tokenizer_round_trips(task):
    tokenizer = AutoTokenizer.from_pretrained(task.model_dir)
    for triple in split_triples()[1]:
        assert tokenizer.decode(tokenizer.encode(triple)) == triple


def test_chat_prompt_ends_with_the_generation_prompt():
    tokenizer = make_tokenizer()
    assert tokenizer.convert_ids_to_tokens(chat_ids(tokenizer, "7 2 9")) == ["<user>", "7", "2", "9", "<assistant>"]


def test_only_eos_and_padding_vanish_from_decoded_text():
    tokenizer = make_tokenizer()

    def decode(tokens: list[str]) -> str:
        return tokenizer.decode(tokenizer.convert_tokens_to_ids(tokens), skip_special_tokens=True)

    assert reward(decode(["9", "<eos>"]), "9") == 1.0
    for junk in ("<user>", "<assistant>", "<system>", "<unk>", "9"):
        assert reward(decode(["9", junk]), "9") == 0.0


@pytest.mark.parametrize("completion", ["", "8", "99", "9 9", "<unk>"])
def test_wrong_answers_earn_nothing(completion):
    assert reward(completion, "9") == 0.0


def test_untrained_model_is_right_by_chance_only(task):
    """A right answer has two tokens, digit and end: about (1/16)^2 if all tokens are alike."""
    tokenizer, model = make_tokenizer(), AutoModelForCausalLM.from_pretrained(task.model_dir)
    _, test = split_triples()
    ids = torch.tensor([chat_ids(tokenizer, t) for t in test])
    answers = torch.tensor(tokenizer.convert_tokens_to_ids([max(t.split()) for t in test]))
    with torch.no_grad():
        digit = model(ids).logits[:, -1].softmax(-1).gather(1, answers[:, None])[:, 0]
        end = model(torch.cat([ids, answers[:, None]], 1)).logits[:, -1].softmax(-1)[:, tokenizer.eos_token_id]
    assert 0 < (digit * end).mean() < 0.05


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    """Two event files, as validate and fit leave them, the second one starting again at step 0."""
    for first, last in ((0, 0), (0, 40)):
        with SummaryWriter(str(tmp_path), filename_suffix=f".{last}") as writer:
            writer.add_scalar("val/reward", 0.02 + last / 50, last)
            for step in range(first, last):
                writer.add_scalar("reward/mean", step / 40, step)
    return tmp_path


def test_scalars_of_all_event_files_are_read(log_dir):
    scalars = read_scalars(log_dir)
    assert scalars["val/reward"][0] == [0, 40]
    assert scalars["val/reward"][1] == pytest.approx([0.02, 0.82])
    assert scalars["reward/mean"][0] == list(range(40))


def test_curve_is_a_picture_with_something_in_it(log_dir):
    picture = draw_curve(log_dir)
    assert picture == log_dir / "reward.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 10_000


def test_curve_of_a_folder_without_a_run_says_so(tmp_path):
    with pytest.raises(ValueError, match="no TensorBoard scalars"):
        draw_curve(tmp_path)
