"""Makes the docstrings' cross-references and examples those of the site; loaded by mkdocs.yml."""

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|mod|data|attr):`~?([\w.]+)`")
_EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)
_PROGRAM = re.compile(r"^Example::\n\n((?:    .*\n?|\n)+)", re.MULTILINE)


class Docstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is None:
            return
        text = _PROGRAM.sub(_fenced, obj.docstring.value)
        obj.docstring.value = _ROLE.sub(_link, _EXAMPLE.sub("Examples:", text))


def _link(found: re.Match[str]) -> str:
    name = found[1]
    # A name that has no page is left as it is.
    return f'<autoref optional identifier="{name}"><code>{name.removeprefix("lightrl.")}</code></autoref>'


def _fenced(found: re.Match[str]) -> str:
    lines = [line.removeprefix("    ") for line in found[1].strip("\n").splitlines()]
    return "\n".join(["```python", *lines, "```"])
