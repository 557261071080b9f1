"""From rows to token ids, once: what the engine gets and what is trained on are these same ids."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from lightrl.prompts.rows import ground_truth
from lightrl.types import Prompt

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

_RESERVED = {
    "add_generation_prompt",
    "continue_final_message",
    "conversation",
    "return_dict",
    "return_tensors",
    "tokenize",
}


def tokenize_prompts(
    rows: Sequence[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_tokens: int | None,
    on_long_prompt: Literal["raise", "drop"] = "raise",
    system_prompt: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[Prompt]:
    """Tokenise the prompts of :func:`~lightrl.prompts.rows.load_rows`.

    Chat messages go through the tokenizer's chat template once, with its generation prompt, and get no special token on
    top of the template's. Strings are encoded as they are with the tokenizer's special tokens; one that already begins
    with the BOS text gets no second BOS.

    Args:
        rows: Rows with a ``prompt``, all strings or all chat messages.
        tokenizer: Hugging Face tokenizer of the policy.
        max_prompt_tokens: Longest prompt allowed, in tokens, template included; None for no limit.
        on_long_prompt: ``"raise"`` refuses a data set with longer prompts, ``"drop"`` leaves them out with a warning.
        system_prompt: Put in front of every conversation that has no system message of its own.
        template_kwargs: Further arguments of the chat template, such as ``{"enable_thinking": False}``.

    Returns:
        One prompt for each row that is kept; ``index`` is its position in ``rows``, ``columns`` the whole row.

    Raises:
        ValueError: If the template is missing or fails on a row, an argument does not fit the rows, a prompt has no
            tokens, or prompts are too long (all of them, or any under ``"raise"``).
    """
    if on_long_prompt not in ("raise", "drop"):
        raise ValueError(f"on_long_prompt={on_long_prompt!r}: must be 'raise' or 'drop'.")
    if max_prompt_tokens is not None and max_prompt_tokens < 1:
        raise ValueError(f"max_prompt_tokens={max_prompt_tokens}: must be 1 or more, or None for no limit.")
    if not rows:
        raise ValueError("there are no rows to tokenise: give at least one prompt.")
    if isinstance(rows[0]["prompt"], str):
        texts = [str(row["prompt"]) for row in rows]
        ids = _encode_plain(texts, tokenizer, system_prompt, template_kwargs)
    else:
        texts = _render(rows, tokenizer, system_prompt, dict(template_kwargs or {}))
        ids = _encode(texts, tokenizer, special_tokens=False)
    prompts = [
        Prompt(token_ids=ids[i], ground_truth=ground_truth(row), columns=dict(row), index=i, text=texts[i])
        for i, row in enumerate(rows)
    ]
    empty = next((p for p in prompts if not p.token_ids), None)
    if empty is not None:
        raise ValueError(
            f"row {empty.index}: the tokenizer makes no token of the prompt {empty.text[:120]!r}. Remove it."
        )
    return prompts if max_prompt_tokens is None else _limit(prompts, max_prompt_tokens, on_long_prompt)


def stop_token_ids(
    tokenizer: PreTrainedTokenizerBase,
    generation_config: GenerationConfig | None,
    model_config: PretrainedConfig | None,
) -> tuple[int, ...]:
    """Return every id that ends a completion: the EOS ids of tokenizer, generation config and model config, sorted.

    Raises:
        ValueError: If none of them names an EOS id, so that no completion would ever end by itself.
    """
    found: set[int] = set()
    for owner in (tokenizer, generation_config, model_config):
        eos = getattr(owner, "eos_token_id", None)
        if eos is not None:
            found.update(eos if isinstance(eos, list | tuple | set) else [eos])
    if not found:
        raise ValueError(
            "nothing stops a completion: tokenizer, generation config and model config all have eos_token_id=None. "
            "Set tokenizer.eos_token to the token that ends an answer."
        )
    return tuple(sorted(int(i) for i in found))


def _encode(texts: list[str], tokenizer: PreTrainedTokenizerBase, special_tokens: bool) -> list[list[int]]:
    encoded = tokenizer(
        texts,
        add_special_tokens=special_tokens,
        padding=False,
        truncation=False,
        return_attention_mask=False,
        verbose=False,
    )
    return [list(ids) for ids in encoded["input_ids"]]


def _encode_plain(
    texts: list[str],
    tokenizer: PreTrainedTokenizerBase,
    system_prompt: str | None,
    template_kwargs: Mapping[str, Any] | None,
) -> list[list[int]]:
    if system_prompt is not None or template_kwargs:
        raise ValueError(
            f"system_prompt={system_prompt!r} and template_kwargs={template_kwargs!r} belong to chat messages, and the "
            'prompts are strings, which are not templated. Write each as [{"role": "user", "content": "..."}].'
        )
    bos = str(tokenizer.bos_token) if tokenizer.bos_token else None
    ids = _encode(texts, tokenizer, special_tokens=True)
    rendered = [i for i, text in enumerate(texts) if bos is not None and text.startswith(bos)]
    if rendered:
        for i, again in zip(
            rendered, _encode([texts[i] for i in rendered], tokenizer, special_tokens=False), strict=True
        ):
            ids[i] = again
    return ids


def _render(
    rows: Sequence[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    system_prompt: str | None,
    template_kwargs: dict[str, Any],
) -> list[str]:
    if not (getattr(tokenizer, "chat_template", None) or template_kwargs.get("chat_template")):
        raise ValueError(
            f"the prompts are chat messages and the tokenizer {tokenizer.name_or_path!r} has no chat template. "
            "Use an instruct model, set tokenizer.chat_template, or give the prompts as strings."
        )
    clash = sorted(_RESERVED & template_kwargs.keys())
    if clash:
        raise ValueError(f"template_kwargs sets {clash}, which lightrl sets itself. Remove them.")
    texts = []
    for i, row in enumerate(rows):
        # Columnar files give every message the keys of all messages; a template must not see the absent ones as None.
        messages = [{k: v for k, v in m.items() if v is not None or k == "content"} for m in row["prompt"]]
        if system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system_prompt})
        try:
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **template_kwargs
            )
        except Exception as error:
            raise ValueError(
                f"row {i}: the chat template of {tokenizer.name_or_path!r} refuses its messages "
                f"(roles {[m['role'] for m in messages]}): {error}. Change the messages or the template."
            ) from error
        texts.append(str(text))
    return texts


def _limit(prompts: list[Prompt], limit: int, on_long_prompt: str) -> list[Prompt]:
    long = [p for p in prompts if len(p.token_ids) > limit]
    if not long:
        return prompts
    longest = max(len(p.token_ids) for p in long)
    facts = (
        f"{len(long)} of {len(prompts)} prompts are longer than max_prompt_tokens={limit} "
        f"(the longest has {longest} tokens; the first is row {long[0].index}, {len(long[0].token_ids)} tokens)"
    )
    if len(long) == len(prompts):
        raise ValueError(f"{facts}, so none is left. Raise max_prompt_tokens or shorten the prompts.")
    if on_long_prompt == "raise":
        raise ValueError(
            f"{facts}. Raise max_prompt_tokens, shorten them, or leave them out with on_long_prompt='drop'."
        )
    warnings.warn(f"{facts}; they are left out.", stacklevel=3)
    return [p for p in prompts if len(p.token_ids) <= limit]
