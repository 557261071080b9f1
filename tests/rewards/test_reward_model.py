"""A classifier as a reward: batches, templates, padding, labels."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, Qwen3ForSequenceClassification

from lightrl.rewards import RewardModel, RewardSum
from lightrl.types import Prompt
from tests.helpers.environments import chat_tokenizer
from tests.helpers.tiny import tiny_model

TEXTS = ["w7", "w8 w9 w10", "", "w11 w12"]


def save_classifier(folder: Path, labels: int = 1) -> Path:
    config = tiny_model().config
    config.num_labels = labels
    with torch.random.fork_rng():
        torch.manual_seed(3)
        Qwen3ForSequenceClassification(config).save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_classifier(tmp_path_factory.mktemp("judge"))


def by_hand(path: Path, ids: list[int]) -> float:
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    with torch.no_grad():
        return float(model(torch.tensor([ids])).logits[0, 0])


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_each_completion_gets_the_models_logit(path: Path, chat: bool, batch_size: int) -> None:
    prompt: Any = [{"role": "user", "content": "w6"}] if chat else "w6 "
    scorer = RewardSum(RewardModel(path, batch_size=batch_size))
    prompts = [Prompt([6], columns={"prompt": prompt})] * len(TEXTS)
    found = [s.total for s in scorer.score(TEXTS, prompts)]
    for text, score in zip(TEXTS, found, strict=True):
        words = [int(word[1:]) for word in text.split()]
        ids = [3, 6, 5, *words, 2] if chat else [6, *words]
        assert score == pytest.approx(by_hand(path, ids), abs=1e-5)
    scorer.close()


def test_long_ones_lose_their_beginning(path: Path) -> None:
    model = RewardModel(path, max_tokens=2)
    assert model(["w8 w9 w10"], ["w6 "])[0] == pytest.approx(by_hand(path, [9, 10]), abs=1e-5)


def test_a_label_has_to_be_chosen_where_there_are_several(tmp_path: Path) -> None:
    save_classifier(tmp_path, labels=2)
    with pytest.raises(ValueError, match=r"label=None: .* has 2 labels. Say which"):
        RewardModel(tmp_path)
    with pytest.raises(ValueError, match="label=2"):
        RewardModel(tmp_path, label=2)
    first, second = (RewardModel(tmp_path, label=i)(["w7"], ["w6 "])[0] for i in (0, 1))
    assert first != second
    with pytest.raises(ValueError, match="batch_size=0"):
        RewardModel(tmp_path, batch_size=0)
