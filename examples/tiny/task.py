"""The demo's model and data, made from a seed: say the largest of three digits.

Left out on purpose: any pretraining. The model starts from random weights, and reinforcement learning alone has to find
out that an answer is one digit, that it ends there, and which digit it is. So the vocabulary is small and the answer
short.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

DIGITS = "0123456789"
VOCABULARY = ["<pad>", "<eos>", "<unk>", "<system>", "<user>", "<assistant>", *DIGITS]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '> ' + message['content'] + ' ' }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token + ' ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
FORMAT = 1  # raise it when the files below change, so that folders written by older code are made again


@dataclass(frozen=True)
class TinyTask:
    """Where the task's files are."""

    model_dir: Path
    """Checkpoint folder in Hugging Face's layout, tokenizer included."""
    train: Path
    """Parquet file of training prompts."""
    test: Path
    """Parquet file of held-out prompts, none of them in ``train``."""


def reward(completion: str, ground_truth: str) -> float:
    """Return 1.0 for exactly the right digit and nothing else, 0.0 otherwise.

    Example:
        >>> reward("9", "9"), reward("99", "9"), reward("", "9")
        (1.0, 0.0, 0.0)
    """
    return float(completion.strip() == ground_truth)


def write_task(out: str | Path = "runs/tiny", seed: int = 0) -> TinyTask:
    """Write the checkpoint and the two data files below ``out``, unless they are there already.

    A folder that is incomplete, damaged or from another seed is made again.
    """
    folder = Path(out) / "task"
    task = TinyTask(folder / "model", folder / "train.parquet", folder / "test.parquet")
    if _is_complete(folder, seed):
        return task
    shutil.rmtree(folder, ignore_errors=True)
    task.model_dir.mkdir(parents=True)
    make_tokenizer().save_pretrained(task.model_dir)
    make_model(seed).save_pretrained(task.model_dir)
    train, test = split_triples(seed)
    _write_parquet(train, task.train)
    _write_parquet(test, task.test)
    # Last, so that a run killed before this line leaves a folder that counts as unfinished.
    _manifest_path(folder).write_text(json.dumps(_manifest(folder, seed), indent=1))
    return task


def split_triples(seed: int = 0, held_out: float = 0.2, rows_per_answer: int = 220) -> tuple[list[str], list[str]]:
    """Return prompts such as ``"7 2 9"`` to train on and to test on: all 1000 triples, each on one side only.

    Of a hundred triples 27 have the answer 9 and three an answer below 3. Trained on as they come, the policy can give
    the rare answers up before it has tried them often enough. So training rows are repeated until every answer has
    ``rows_per_answer`` of them; no row of the test is.
    """
    rng = random.Random(seed)
    train: list[str] = []
    test: list[str] = []
    for answer in DIGITS:
        triples = [" ".join(t) for t in itertools.product(DIGITS, repeat=3) if max(t) == answer]
        rng.shuffle(triples)
        cut = round(held_out * len(triples))
        test += triples[:cut]
        train += itertools.islice(itertools.cycle(triples[cut:]), rows_per_answer)
    rng.shuffle(train)
    rng.shuffle(test)
    return train, test


def make_tokenizer(words: Sequence[str] = VOCABULARY, chat_template: str = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """Return a tokenizer of one token a word, set apart by spaces; ``words`` begin like ``VOCABULARY``."""
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # Only these two are "special", which decoding leaves out: "9 <user>" must not be taken for the answer "9".
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
        model_max_length=128,
    )


def make_model(seed: int = 0, words: Sequence[str] = VOCABULARY) -> Qwen3ForCausalLM:
    """Return a Qwen3 of 0.3 million random weights; the caller's random state is left alone."""
    config = Qwen3Config(
        vocab_size=len(words),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.05,  # the usual 0.02 is for wide models; this narrow one then learns too slowly for a demo
        head_dim=64,  # vLLM's CPU attention has no kernel for 16
        max_position_embeddings=128,
        tie_word_embeddings=False,
        pad_token_id=VOCABULARY.index("<pad>"),
        eos_token_id=VOCABULARY.index("<eos>"),
        bos_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    # Nearly the same odds for every token: an answer that the random weights disfavour would hardly be tried.
    with torch.no_grad():
        model.lm_head.weight.mul_(0.3)
    model.generation_config.update(do_sample=True, temperature=1.0)
    return model


def _write_parquet(triples: list[str], path: Path) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": triple}], "reward_model": {"ground_truth": max(triple.split())}}
        for triple in triples
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)


def _manifest_path(folder: Path) -> Path:
    return folder / "task.json"


def _manifest(folder: Path, seed: int) -> dict[str, Any]:
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p != _manifest_path(folder))
    digests = {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}
    return {"format": FORMAT, "seed": seed, "sha256": digests}


def _is_complete(folder: Path, seed: int) -> bool:
    try:
        return bool(json.loads(_manifest_path(folder).read_text()) == _manifest(folder, seed))
    except (FileNotFoundError, json.JSONDecodeError):
        return False


if __name__ == "__main__":
    print(write_task().model_dir.parent)
