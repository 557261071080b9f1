r"""Mathematical equality: ``\frac{1}{2}`` is ``0.5`` (extra ``math``)."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from lightrl.optional import require_optional
from lightrl.rewards.extract import boxed_answer, has_box
from lightrl.rewards.killable import ChildPool
from lightrl.rewards.pool import RewardTimeoutError

_LONGEST_ANSWER = 1000  # characters; nobody writes a longer one, and the parser is slow on them


class MathMatch:
    r"""1.0 where the answer in the last box is mathematically equal to the ground truth.

    The comparison is math-verify's, in child processes that are killed when they take too long; an answer that takes
    too long counts as wrong, and in ``timeouts``. Beyond math-verify: numbers must agree within 1e-5 of their size
    whatever it is, and ratios and clock times (``12:30``) only match themselves. ``50\%`` equals ``0.5`` and ``50``, an
    open interval ``(0,1)`` equals the set ``{0,1}``.

    Args:
        timeout: seconds that a comparison may take.
        unboxed: where there is no box at all, take the last line of the completion for the answer.

    Raises:
        ValueError: math-verify is not installed, or a row has no ground truth.

    Attributes:
        timeouts: answers that took too long so far.
    """

    def __init__(self, timeout: float = 5.0, unboxed: bool = False) -> None:
        self.unboxed = unboxed
        self.timeouts = 0
        self._equal = ChildPool(f"{Path(__file__).with_name('math_child.py')}:equal", timeout)

    def __call__(self, completion: str, ground_truth: Any) -> float:
        """Return 1.0 or 0.0."""
        require_optional("math_verify", "math_match")
        gold = _bare(str(ground_truth)) if ground_truth is not None else ""
        if not gold:
            raise ValueError(f"ground_truth={ground_truth!r} is no answer to compare with: correct the row.")
        answer = self._answer(completion)
        if not answer or len(answer) > _LONGEST_ANSWER:
            return 0.0
        try:
            return float(self._equal.call(answer, gold))
        except RewardTimeoutError:
            if not self.timeouts:
                warnings.warn(
                    f"comparing {answer[:80]!r} with {gold[:80]!r} took too long: it counts as wrong, and further ones "
                    "are only counted",
                    stacklevel=2,
                )
            self.timeouts += 1
            return 0.0

    def _answer(self, completion: str) -> str:
        if has_box(completion):
            return boxed_answer(completion) or ""
        lines = completion.strip().splitlines()
        return _bare(lines[-1]) if lines and self.unboxed else ""

    def close(self) -> None:
        """End the child processes; a later call starts new ones."""
        self._equal.close()


def _bare(text: str) -> str:
    if has_box(text):
        return boxed_answer(text) or ""
    return text.strip().strip("$").strip()


math_match = MathMatch()
r""":class:`MathMatch` with its defaults, under a name that an import path can lead to."""
