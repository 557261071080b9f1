r"""Where the answer stands in a completion.

Rules for boxes: ``\boxed`` and ``\fbox`` are the same; the last box counts, and one that is empty or never closed is no
answer (an earlier box does not step in); braces balance, escaped ones do not count; a box whose whole content is a box
means the inner one.
"""

from __future__ import annotations

import re

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_BARE = re.compile(r"[^\s$\\{}]+")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_DEEPEST_NESTING = 8  # each level reads the content again
_HASH = re.compile(r"####[ \t]*([^\n]*)")


def has_box(text: str) -> bool:
    r"""Tell whether there is a ``\boxed`` or ``\fbox``, complete or not."""
    return _BOX.search(text) is not None


def boxed_answer(text: str) -> str | None:
    r"""Return the content of the last box, without outer whitespace, or None where there is no answer.

    Example:
        >>> boxed_answer(r"first \boxed{3}, no: \boxed{\frac{1}{2}}"), boxed_answer(r"\boxed{3} but then \boxed{")
        ('\\frac{1}{2}', None)
    """
    answer: str | None = None
    position = 0
    while (box := _BOX.search(text, position)) is not None:
        answer, position = _content(text, box.end())
    for _ in range(_DEEPEST_NESTING):
        inner = _BOX.match(answer or "")
        if answer is None or inner is None:
            break
        content, end = _content(answer, inner.end())
        if end < len(answer):
            break
        answer = content
    return answer


def hash_answer(text: str) -> str | None:
    r"""Return what follows the last ``####`` on its line, as in GSM8K, or None where nothing does.

    Example:
        >>> hash_answer("6 * 7 makes 42.\n#### 42")
        '42'
    """
    found = _HASH.findall(text)
    return (found[-1].strip() or None) if found else None


def _content(text: str, start: int) -> tuple[str | None, int]:
    """Return a box's content (None: empty or not closed) and where to look on."""
    if not text.startswith("{", start):
        bare = _BARE.match(text, start)
        return (bare.group().rstrip(".,;:!?") or None, bare.end()) if bare else (None, start)
    depth = 0
    for mark in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(mark.group(), 0)
        if depth == 0:
            return text[start + 1 : mark.start()].strip() or None, mark.end()
    return None, len(text)
