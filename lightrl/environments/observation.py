"""Observations as token ids: what stands between two turns of the model, made without touching the tokens before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightrl.rewards.base import shorten

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SAID = "the-turn-of-the-model"  # stands for the model's own words while the template writes what comes after them


class ObservationEncoder:
    """Encodes observations so that they can be appended to the tokens of an episode.

    A chat template writes whole conversations. It is given one in which the model has said a placeholder, and what it
    writes after that placeholder is encoded: the end of the model's turn, the messages, and the opening of the next
    turn. So the model's own tokens are never decoded and encoded again.

    Args:
        tokenizer: of the policy.
        template_kwargs: further arguments of the chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any] | None = None) -> None:
        self.tokenizer, self.template_kwargs = tokenizer, dict(template_kwargs or {})

    def encode(self, observation: Any, *, chat: bool, ended: int | None) -> list[int]:
        """Return the token ids of an observation.

        Args:
            observation: text, chat messages or token ids.
            chat: the episode's prompt is a chat, in which text is a user message.
            ended: the stop token that ended the model's turn; None where the token budget did.

        Raises:
            ValueError: it is nothing of the kind, a token id is none of the tokenizer's, or the chat template does not
                take the messages.
        """
        if isinstance(observation, str):
            if not chat:
                return self._ids(observation)
            observation = [{"role": "user", "content": observation}]
        if isinstance(observation, Sequence) and not isinstance(observation, bytes) and observation:
            if all(isinstance(item, dict) and "role" in item for item in observation):
                return self._ids(self._after_turn(list(observation), ended))
            if all(isinstance(item, int) and not isinstance(item, bool) for item in observation):
                return self._in_vocabulary(list(observation))
        raise ValueError(
            f"step returned a {type(observation).__name__} ({shorten(observation)}): return text, chat messages, token "
            "ids, or Done(reward)"
        )

    def _in_vocabulary(self, ids: list[int]) -> list[int]:
        size = len(self.tokenizer)
        wrong = next((i for i in ids if not 0 <= i < size), None)
        if wrong is not None:  # the engine would end the whole run
            raise ValueError(f"step returned the token id {wrong}, and the tokenizer has 0 to {size - 1}")
        return ids

    def _after_turn(self, messages: list[dict[str, Any]], ended: int | None) -> str:
        said = _SAID
        while said in str(messages):
            said += "-"
        before = [{"role": "user", "content": "."}, {"role": "assistant", "content": said}]
        try:
            text = str(
                self.tokenizer.apply_chat_template(
                    before + messages, tokenize=False, add_generation_prompt=True, **self.template_kwargs
                )
            )
        except Exception as error:
            raise ValueError(
                f"the chat template refuses an observation with the roles {[m['role'] for m in messages]}: {error}. "
                "Return it as text, or as token ids"
            ) from error
        _, found, rest = text.partition(said)
        if not found or said in rest:
            raise ValueError(
                "the chat template does not write the model's turns word for word: return observations as token ids"
            )
        if ended is None:
            return rest
        # The model has written the end of its turn itself.
        space, end, after = rest.partition(str(self.tokenizer.convert_ids_to_tokens(ended)))
        return after if end and not space.strip() else rest

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
