"""A trained reward model as a reward."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from lightrl.arguments import check_at_least_one


class RewardModel:
    """Scores completions with a sequence classifier, in batches.

    A chat prompt and its completion go through the classifier's own chat template, a text prompt and its completion
    are joined; both are encoded by its own tokenizer.

    Args:
        path: checkpoint for ``AutoModelForSequenceClassification``.
        device: where it runs; ``"cuda"`` is the GPU of this process.
        batch_size: completions at once.
        label: which logit is the reward; None: the only one there is.
        dtype: of its weights, such as ``"bfloat16"``; None: the checkpoint's.
        max_tokens: longest prompt + completion; longer ones lose their beginning. None: no limit.
        trust_remote_code: run code that comes with the model.

    Raises:
        ValueError: an argument is out of range, or the model has several logits and ``label`` chooses none.
    """

    def __init__(
        self,
        path: str | Path,
        device: str = "cpu",
        batch_size: int = 16,
        label: int | None = None,
        dtype: str | None = None,
        max_tokens: int | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        check_at_least_one(batch_size=batch_size, max_tokens=max_tokens)
        # Its __name__ and logged metric are the class's: two models want a mapping of name to reward.
        self.batch_size, self.max_tokens = batch_size, max_tokens
        local = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if device == "cuda" else device
        self.device = torch.device(local)
        options = {"trust_remote_code": trust_remote_code}
        self.tokenizer: Any = AutoTokenizer.from_pretrained(str(path), **options)
        model: Any = AutoModelForSequenceClassification.from_pretrained(str(path), dtype=dtype or "auto", **options)
        if not 0 <= (label or 0) < model.config.num_labels or (label is None and model.config.num_labels > 1):
            raise ValueError(
                f"label={label}: {path} has {model.config.num_labels} labels. Say which of them is the reward."
            )
        self.label = label or 0
        self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token
        model.config.pad_token_id = self.tokenizer.pad_token_id  # the classifier reads each row's last real token
        self.model = model.requires_grad_(False).eval()

    def __call__(self, completions: list[str], prompts: list[Any]) -> list[float]:
        """Return one logit for each completion."""
        self.model.to(self.device)
        texts = [self._join(prompt, text) for prompt, text in zip(prompts, completions, strict=True)]
        templated = not all(isinstance(prompt, str) for prompt in prompts)
        encoded = self.tokenizer(texts, add_special_tokens=not templated, verbose=False)["input_ids"]
        ids = [row[-self.max_tokens :] if self.max_tokens else row for row in encoded]
        scores = [0.0] * len(ids)
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))  # little padding
        for start in range(0, len(order), self.batch_size):
            rows = order[start : start + self.batch_size]
            for row, score in zip(rows, self._score([ids[i] for i in rows]), strict=True):
                scores[row] = score
        return scores

    def _join(self, prompt: Any, completion: str) -> str:
        if isinstance(prompt, str):
            return prompt + completion
        messages = [*prompt, {"role": "assistant", "content": completion}]
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False))

    @torch.no_grad()
    def _score(self, ids: list[list[int]]) -> list[float]:
        batch = self.tokenizer.pad({"input_ids": ids}, return_tensors="pt", padding_side="right").to(self.device)
        logits = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return logits[:, self.label].float().tolist()  # type: ignore[no-any-return]
