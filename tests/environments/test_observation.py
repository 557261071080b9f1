"""What an environment may answer, and which tokens that becomes."""

from typing import Any

import pytest

from lightrl.environments import Done, Episodes, Turn
from lightrl.environments.observation import ObservationEncoder
from tests.helpers.environments import Echo, chat_tokenizer, chats, play, turns_of
from tests.helpers.tiny import tiny_tokenizer


class Answers(Echo):
    """Answers the first turn with ``answer``."""

    answer: Any = ""

    def step(self, turn: Turn) -> Any:
        self.seen.append(turn)
        return type(self).answer if len(self.seen) == 1 else Done(reward=1.0)


def answering(value: Any) -> type[Answers]:
    return type("Answers", (Answers,), {"answer": value, "made": []})


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("w7 w8", ["w3", "w7", "w8", "w5"]),  # text behind a chat is a user message
        ([{"role": "tool", "content": "w7"}], ["w4", "w7", "w5"]),
        ([{"role": "tool", "content": "w7"}, {"role": "user", "content": "w8"}], ["w4", "w7", "w3", "w8", "w5"]),
        ([20, 21], ["w20", "w21"]),
    ],
    ids=["text", "message", "messages", "ids"],
)
@pytest.mark.parametrize("ended", [2, None], ids=["ended", "cut"])
def test_an_observation_stands_where_the_template_puts_it(answer: Any, words: list[str], ended: int | None) -> None:
    tokenizer = chat_tokenizer()
    heard = tokenizer.convert_ids_to_tokens(ObservationEncoder(tokenizer).encode(answer, chat=True, ended=ended))
    # A turn that the budget cut has not said its stop token: the template's own is there, and not trained on.
    assert heard == (words if ended or isinstance(answer[0], int) else ["<eos>", *words])


def test_an_observation_may_hold_the_words_that_stand_for_the_models() -> None:
    from lightrl.environments.observation import _SAID

    encoder = ObservationEncoder(chat_tokenizer())
    plain = encoder.encode("w7 so", chat=True, ended=2)
    assert encoder.encode(f"w7 {_SAID}", chat=True, ended=2) == plain, "one unknown word each"


def test_text_behind_a_text_prompt_is_encoded_as_it_is() -> None:
    assert ObservationEncoder(tiny_tokenizer()).encode("w7 w8", chat=False, ended=2) == [7, 8]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
            "does not write the model's turns word for word",
        ),
        (
            "{{ raise_exception('roles must alternate') }}",
            r"refuses an observation with the roles \['tool'\].*alternate",
        ),
    ],
)
def test_a_template_that_cannot_be_continued_is_named(template: str, message: str) -> None:
    encoder = ObservationEncoder(chat_tokenizer(template))
    with pytest.raises(ValueError, match=message):
        encoder.encode([{"role": "tool", "content": "w7"}], chat=True, ended=2)


def test_chats_through_a_fit_continue_their_tokens() -> None:
    watch = play(
        Episodes(answering("w7 w8"), max_turn_tokens=3), prompts=chats(), tokenizer=chat_tokenizer(), group_size=8
    )
    for rollout in watch.trained[0]:
        start, end, _ = turns_of(rollout)[1]
        cut = rollout.completion_ids[start - 1] != 2
        assert rollout.completion_ids[start:end] == [2] * cut + [3, 7, 8, 5]


@pytest.mark.parametrize("answer", [None, 5, [], [1.5], {"role": "user"}, b"w7", ["w7"]])
def test_an_answer_that_is_none_is_named(answer: Any) -> None:
    with pytest.raises(RuntimeError, match=r"all 4 episodes crashed: .*step returned a .*: return text, chat messages"):
        play(answering(answer))


@pytest.mark.parametrize("ids", [[32], [6, -1], [10**9]], ids=str)
def test_token_ids_beyond_the_vocabulary_cost_their_episode_only(ids: list[int]) -> None:
    class Beyond(Echo):
        def step(self, turn: Turn) -> Any:
            return ids if self.prompt.index == 0 else Done(reward=1.0)

    with pytest.warns(UserWarning, match=f"step returned the token id {ids[-1]}, and the tokenizer has 0 to 31"):
        watch = play(Episodes(Beyond, max_turn_tokens=3), prompts_per_step=2, shuffle=False)
    assert [r.reward for r in watch.trained[0]] == [1.0, 1.0]


def test_empty_and_strange_text_is_an_observation_too() -> None:
    for text in ("", "\N{SNOWMAN} \u2028 \U0001f600", "<eos>"):
        watch = play(Episodes(answering(text), max_turn_tokens=3))
        assert all(r.reward == 1.0 and r.turns == 2 for r in watch.trained[0])
