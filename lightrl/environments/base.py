"""What an environment is: it answers each of the model's turns with an observation, or ends the episode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from lightrl.arguments import check_at_least_one
from lightrl.rewards.base import import_callable
from lightrl.types import Prompt


@dataclass(frozen=True, slots=True)
class Turn:
    """What the model said in one turn of an episode."""

    index: int
    """0 for the first."""
    text: str
    """Its tokens as text, without special tokens."""
    raw_text: str
    """Its tokens as text with special tokens, but without the stop token that ended it."""
    token_ids: list[int]
    """Its tokens, the stop token included."""
    truncated: bool
    """True where the token budget ended it and no stop token did."""


@dataclass(frozen=True, slots=True)
class Done:
    """The answer that ends an episode."""

    reward: float | None = None
    """The environment's own reward, with weight 1 beside the reward functions; None leaves it to them."""


class Environment(Protocol):
    """One episode's world. It may be a plain class whose constructor takes the prompt.

    Example:
        >>> class Guess:
        ...     def __init__(self, prompt):
        ...         self.secret = int(prompt.ground_truth)
        ...
        ...     def step(self, turn):
        ...         said = turn.text.strip()
        ...         if said == str(self.secret):
        ...             return Done(reward=1.0)
        ...         return "higher" if said.isdigit() and int(said) < self.secret else "lower"
        >>> Guess(Prompt([1], ground_truth="7")).step(Turn(0, "3", "3", [5], False))
        'higher'
    """

    def step(self, turn: Turn) -> Any:
        """Answer one turn: with an observation, or with :class:`Done`. May be ``async def``.

        Text is encoded as it is behind a text prompt, and is a user message behind a chat; messages go through the
        chat template; token ids are taken as they are.
        """


EnvironmentFactory = Callable[[Prompt], Environment]
"""Makes the environment of one episode."""


class Episodes:
    """How episodes are played.

    Args:
        environment: makes the environment of each episode from its prompt: a class, a function, or the import path of
            one. It may have ``tools`` (functions or JSON schemas, shown to the model by the chat template) and
            ``setup(tokenizer)``, called once before the first episode.
        max_turns: turns of the model after which an episode ends.
        max_turn_tokens: longest turn; None: what is left of the datamodule's ``max_completion_tokens``, which is the
            budget of a whole episode, observations included.
        step_timeout: seconds that one ``step`` may take; the first includes the making of the environment.
        max_steps_at_once: environments that step at the same time on this rank.

    Raises:
        ValueError: an argument is out of range, or the path leads nowhere.

    Attributes:
        failures: episodes that crashed so far on this rank.
        failures_in_a_row: episodes that crashed, ahead of training, since the last group with one that did not.
    """

    def __init__(
        self,
        environment: str | EnvironmentFactory,
        max_turns: int = 8,
        max_turn_tokens: int | None = None,
        step_timeout: float = 30.0,
        max_steps_at_once: int = 128,
    ) -> None:
        made: Any = import_callable(environment, "environment") if isinstance(environment, str) else environment
        if not callable(made):
            raise ValueError(
                f"environment={made!r} cannot be called: give a class or function that makes an environment of a prompt"
            )
        check_at_least_one(max_turns=max_turns, max_turn_tokens=max_turn_tokens, max_steps_at_once=max_steps_at_once)
        if not step_timeout > 0:
            raise ValueError(f"step_timeout={step_timeout} must be more than 0 seconds")
        self.environment: EnvironmentFactory = made
        self.max_turns, self.max_turn_tokens = max_turns, max_turn_tokens
        self.step_timeout, self.max_steps_at_once = step_timeout, max_steps_at_once
        self.failures = self.failures_in_a_row = 0

    @property
    def tools(self) -> list[Any] | None:
        """What the chat template is told of, or None."""
        return list(getattr(self.environment, "tools", ())) or None

    def setup(self, tokenizer: Any) -> None:
        """Tell the environment which tokenizer is used, where it wants to know."""
        setup = getattr(self.environment, "setup", None)
        if setup is not None:
            setup(tokenizer)


def make_episodes(environment: Any) -> Episodes | None:
    """Return :class:`Episodes` of whatever a user gave as environment; None stays None."""
    return environment if environment is None or isinstance(environment, Episodes) else Episodes(environment)
