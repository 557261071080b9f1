"""The weighted sum of reward terms, checked and with a deadline on every call."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, Literal

from lightrl.rewards.base import RewardSpec, RewardTerm, check_batch, check_value, make_terms, shorten
from lightrl.rewards.event_loop import EventLoopThread
from lightrl.rewards.pool import Outcome, RewardTimeoutError, run_calls
from lightrl.types import Prompt


class _Failed(Enum):
    """In the place of a value."""

    FAILED = 0


@dataclass(slots=True)
class Score:
    """What one completion got."""

    total: float | None = None
    """Weighted sum of the terms that are not None; None where every term abstained, or one failed."""
    terms: dict[str, float | None] = field(default_factory=dict)
    """Each function's own value, before weights; None where it abstained or was excluded."""


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of one term, for the completions at ``positions``."""

    term: RewardTerm
    positions: list[int]
    run: Callable[[], Any]


class RewardSum:
    """Scores completions with one or more reward functions.

    A reward is ``reward(completion, ground_truth, **columns) -> float``: the first parameter takes the completion text,
    the second the ground truth (unless it is named after a column), all others take the column of their name;
    ``**kwargs`` takes all. With a parameter ``completions`` it is called once, with lists (``completions``,
    ``ground_truths``, ``prompts``, each column), and returns one value for each completion. ``completion_ids`` are the
    token ids. ``async def`` runs on an event loop, everything else on threads. None means "I abstain".

    Functions written for two other libraries work as they are. TRL's ``reward(prompts, completions, **columns)``: a
    batched function with ``**kwargs`` gets completions of chat prompts as lists of one assistant message. verl's
    ``compute_score(data_source, solution_str, ground_truth, extra_info)``: a parameter ``solution_str`` takes the
    completion, and a dict counts by its ``"score"``.

    A reward may have ``close()`` or ``async aclose()``: :meth:`close` calls it, and the reward may be called again.

    Args:
        rewards: A function, an import path, a list of those, or a mapping of name to reward or ``(reward, weight)``.
        weights: One for each reward of a list.
        timeout: Seconds that one call may take.
        workers: Threads that run calls.
        on_error: What becomes of a call that raises, takes too long, or returns NaN or infinity: ``"raise"`` raises and
            names it, ``"exclude"`` gives its completions no total (a sum without the term would be held against whole
            ones), counts them in :attr:`failures` and warns once a function. A result of the wrong type or length
            always raises.
        max_async_calls: How many calls of async rewards run at the same time.

    Raises:
        ValueError: If an argument is out of range, or a reward is none.

    Example:
        >>> scorer = RewardSum({"right": lambda text, truth: text == truth, "short": (lambda text: -len(text), 0.1)})
        >>> scorer.score(["42"], [Prompt([1], ground_truth="42")])[0].total
        0.8
    """

    def __init__(
        self,
        rewards: RewardSpec,
        *,
        weights: Sequence[float] | None = None,
        timeout: float = 60.0,
        workers: int = 8,
        on_error: Literal["raise", "exclude"] = "raise",
        max_async_calls: int = 256,
    ) -> None:
        if on_error not in ("raise", "exclude"):
            raise ValueError(f"on_error={on_error!r}: must be 'raise' or 'exclude'.")
        for name, value in (("timeout", timeout), ("workers", workers), ("max_async_calls", max_async_calls)):
            if not value > 0:
                raise ValueError(f"{name}={value}: must be more than 0.")
        self.terms = make_terms(rewards, weights)
        self.timeout = timeout
        self.workers = workers
        self.on_error = on_error
        self.failures: dict[str, int] = {term.name: 0 for term in self.terms}
        """Completions excluded so far, by term."""
        self._loop = EventLoopThread(timeout, max_async_calls)
        self._one_at_a_time = threading.Lock()  # validation scores while rollouts ahead of training do

    def score(
        self, texts: Sequence[str], prompts: Sequence[Prompt], completion_ids: Sequence[list[int]] | None = None
    ) -> list[Score]:
        """Score N completions.

        Args:
            texts: N completions as text.
            prompts: The prompt of each, N of them.
            completion_ids: The token ids of each, for rewards that want them.

        Returns:
            N scores, in the same order.

        Raises:
            ValueError: If the lengths differ, a reward wants a column that is not there, or it returns neither a finite
                number nor None (NaN and infinity: under ``on_error="raise"``), or not one value for each completion.
            RuntimeError: Under ``on_error="raise"``, if a call raises or takes too long; its cause is the original
                exception.
        """
        if len(texts) != len(prompts) or (completion_ids is not None and len(completion_ids) != len(texts)):
            ids = "" if completion_ids is None else f" and {len(completion_ids)} lists of token ids"
            raise ValueError(
                f"{len(texts)} completions, {len(prompts)} prompts{ids}: give one of each for each completion."
            )
        scores = [Score(terms={term.name: None for term in self.terms}) for _ in texts]
        if not texts:
            return scores
        calls = [call for term in self.terms for call in _make_calls(term, texts, prompts, completion_ids)]
        failed: set[int] = set()
        with self._one_at_a_time:
            for call, outcome in self._run(calls):
                for position, value in zip(call.positions, self._values(call, outcome, texts, prompts), strict=True):
                    if isinstance(value, _Failed):
                        failed.add(position)
                    else:
                        scores[position].terms[call.term.name] = value
        for position, score in enumerate(scores):
            score.total = None if position in failed else self._total(score.terms)
        return scores

    def in_vain(self, prompts: Sequence[Prompt]) -> list[str]:
        """Names of the rewards that take a ground truth, if no prompt has one."""
        if not prompts or any(prompt.ground_truth is not None for prompt in prompts):
            return []
        columns = {"prompt", *prompts[0].columns}
        return [term.name for term in self.terms if term.compares(columns)]

    def close(self) -> None:
        """End the event loop of async rewards, if one was started, and close the rewards that can be."""
        functions = [term.function for term in self.terms]
        self._loop.close([f.aclose for f in functions if hasattr(f, "aclose")])
        for function in functions:
            if hasattr(function, "close"):
                function.close()

    def _total(self, values: dict[str, float | None]) -> float | None:
        given = [(term.weight, value) for term in self.terms if (value := values[term.name]) is not None]
        return sum(weight * value for weight, value in given) if given else None

    def _run(self, calls: list[_Call]) -> list[tuple[_Call, Outcome]]:
        waiting = [call for call in calls if call.term.asynchronous]
        working = [call for call in calls if not call.term.asynchronous]
        fail_fast = self.on_error == "raise"
        job = self._loop.start([call.run for call in waiting], fail_fast)
        done = run_calls(
            [call.run for call in working], timeout=self.timeout, workers=self.workers, fail_fast=fail_fast
        )
        ended = [(c, o) for c, o in zip(working, done, strict=True) if o is not None]
        if fail_fast and any(outcome.error for _, outcome in ended):
            job.done.set()
        ended += [(c, o) for c, o in zip(waiting, self._loop.wait(job), strict=True) if o is not None]
        # An error stops the others, so it comes before what they would have returned.
        return sorted(ended, key=lambda pair: pair[1].error is None)

    def _values(
        self, call: _Call, outcome: Outcome, texts: Sequence[str], prompts: Sequence[Prompt]
    ) -> list[float | _Failed | None]:
        n = len(call.positions)
        if outcome.error is not None:
            self._failed(call.term, call.positions, texts, prompts, outcome.error)
            return [_Failed.FAILED] * n
        values = [outcome.value]
        if call.term.batched:
            try:
                values = check_batch(outcome.value, n)
            except TypeError as error:
                raise ValueError(
                    f"reward {call.term.name!r} must return a list of {n} values, one for each completion, "
                    f"and returned {error}. The first completion: {shorten(texts[call.positions[0]])}"
                ) from error
        return [
            self._value(call.term, i, value, texts, prompts) for i, value in zip(call.positions, values, strict=True)
        ]

    def _value(
        self, term: RewardTerm, position: int, value: Any, texts: Sequence[str], prompts: Sequence[Prompt]
    ) -> float | _Failed | None:
        try:
            return check_value(value)
        except (TypeError, ValueError) as error:
            bad = ValueError(
                f"reward {term.name!r} must return a finite number or None and returned {error}, "
                f"{_where(position, texts, prompts)}"
            )
            if isinstance(error, TypeError) or self.on_error == "raise":
                raise bad from error
            self._failed(term, [position], texts, prompts, bad)
            return _Failed.FAILED

    def _failed(
        self,
        term: RewardTerm,
        positions: list[int],
        texts: Sequence[str],
        prompts: Sequence[Prompt],
        error: BaseException,
    ) -> None:
        first = self.failures[term.name] == 0
        self.failures[term.name] += len(positions)
        what = str(error) if isinstance(error, RewardTimeoutError) else f"{type(error).__name__}: {error}".rstrip(".")
        many = f" (and {len(positions) - 1} more of its batch)" if len(positions) > 1 else ""
        facts = f"reward {term.name!r} failed {_where(positions[0], texts, prompts)}{many}: {what}"
        if self.on_error == "raise":
            raise RuntimeError(f"{facts}. on_reward_error='exclude' would leave such completions out.") from error
        if first:
            warnings.warn(f"{facts}. It is left out of training; further ones are only counted.", stacklevel=4)


def _make_calls(
    term: RewardTerm, texts: Sequence[str], prompts: Sequence[Prompt], completion_ids: Sequence[list[int]] | None
) -> list[_Call]:
    if term.batched:
        lists = _columns_as_lists(texts, prompts, completion_ids)
        if term.takes_all:
            lists["completions"] = [_as_trl(text, prompt) for text, prompt in zip(texts, prompts, strict=True)]
        args, kwargs = term.bind_batch(lists)
        return [_Call(term, list(range(len(texts))), partial(term.function, *args, **kwargs))]
    calls = []
    for i, (text, prompt) in enumerate(zip(texts, prompts, strict=True)):
        columns = {"prompt": prompt.text} | prompt.columns | {"ground_truth": prompt.ground_truth}
        if completion_ids is not None:
            columns["completion_ids"] = completion_ids[i]
        args, kwargs = term.bind(text, prompt.ground_truth, columns)
        calls.append(_Call(term, [i], partial(term.function, *args, **kwargs)))
    return calls


def _columns_as_lists(
    texts: Sequence[str], prompts: Sequence[Prompt], completion_ids: Sequence[list[int]] | None
) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for prompt in prompts for name in prompt.columns)
    lists: dict[str, list[Any]] = {name: [prompt.columns.get(name) for prompt in prompts] for name in names}
    truths = [prompt.ground_truth for prompt in prompts]
    lists |= {"completions": list(texts), "ground_truth": truths, "ground_truths": list(truths)}
    lists["prompts"] = [prompt.columns.get("prompt", prompt.text) for prompt in prompts]
    if completion_ids is not None:
        lists["completion_ids"] = list(completion_ids)
    return lists


def _as_trl(text: str, prompt: Prompt) -> str | list[dict[str, str]]:
    chat = isinstance(prompt.columns.get("prompt"), list)
    return [{"role": "assistant", "content": text}] if chat else text


def _where(position: int, texts: Sequence[str], prompts: Sequence[Prompt]) -> str:
    return f"on prompt row {prompts[position].index}, completion {shorten(texts[position])}"
