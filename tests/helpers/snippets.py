"""Code blocks of the documentation, and small stand-ins for the files that they name."""

from __future__ import annotations

import functools
import json
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks._subprocess import ROOT
from tests.helpers.tiny import tiny_model, tiny_tokenizer

_FENCE = re.compile(r"^```([\w-]*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NAMED = re.compile(r"\A(?:#!.*\n)?# ([\w./-]+\.\w+)$", re.MULTILINE)
_MODEL = re.compile(r"\bQwen/[\w.-]+")
_DATA = re.compile(r"[\w./-]+\.(?:parquet|jsonl)\b")
_BETWEEN = {"&&", "||", "|", ";", "&", "(", ")", ";;"}
CHAT = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
ROWS = 64
"""A step's prompts where nothing else is said."""


@dataclass(frozen=True)
class Block:
    page: str
    language: str
    text: str

    @property
    def file(self) -> str | None:
        """The file that the block is, if its first comment says so."""
        found = _NAMED.match(self.text)
        return found[1] if found else None


@functools.cache
def blocks() -> tuple[Block, ...]:
    """Return every block of every page, in order."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("examples/*/README.md"))]
    return tuple(
        Block(str(page.relative_to(ROOT)), language, text)
        for page in pages
        for language, text in _FENCE.findall(page.read_text())
    )


def of_page(page: str, *languages: str) -> list[Block]:
    return [b for b in blocks() if b.page == page and b.language in languages]


def commands(text: str) -> list[list[str]]:
    """Return the words of each simple command, without variables that are set for it alone."""
    found: list[list[str]] = []
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for token in [*lexer, ";"]:
            if token in _BETWEEN:
                while words and re.match(r"\w+=", words[0]):
                    words.pop(0)
                found += [words] if words else []
                words = []
            else:
                words.append(token)
    return found


def write_stand_ins(folder: Path) -> None:
    """Make what the pages name: models of 0.3 million weights, and rows of two words."""
    text = "\n".join(b.text for b in blocks() if b.language in ("python", "yaml"))
    for name in {n.rstrip(".") for n in _MODEL.findall(text)}:
        model, tokenizer = tiny_model(), tiny_tokenizer()
        model.config.max_position_embeddings = 4096
        tokenizer.chat_template = CHAT
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    rows = [{"prompt": f"w{3 + i % 29} w{3 + i // 29}", "reward_model": {"ground_truth": "5"}} for i in range(ROWS)]
    for name in set(_DATA.findall(text)):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def short_range(*args: int) -> range:
    """The first two of a range."""
    return range(*args)[:2]


def short_data(init: Callable[..., None]) -> Callable[..., None]:
    """A datamodule's ``__init__`` that makes small steps of short completions."""

    @functools.wraps(init)
    def shorter(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)  # what is written has to be right
        prompts = 2 if self.minibatches_per_rollout <= 4 else ROWS
        most = {"group_size": 2, "val_group_size": 2, "max_completion_tokens": 8, "prompts_per_step": prompts}
        for name, limit in most.items():
            setattr(self, name, min(getattr(self, name), limit))

    return shorter


def short_fit(init: Callable[..., None]) -> Callable[..., None]:
    """A Trainer's ``__init__`` on one CPU process, for one step and one batch of validation."""

    @functools.wraps(init)
    def shorter(self: Any, *args: Any, **kwargs: Any) -> None:
        if getattr(kwargs.get("strategy"), "rollout_tp_size", 1) == 1:
            kwargs |= {"devices": 1, "num_nodes": 1}
        kwargs |= {"accelerator": "cpu", "max_steps": 1, "limit_val_batches": 1, "num_sanity_val_steps": 0}
        kwargs |= {"enable_progress_bar": False, "enable_model_summary": False}
        init(self, *args, **kwargs)

    return shorter
