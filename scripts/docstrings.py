"""Docstrings of this project as Sphinx wants them.

They are written as Markdown is: what is indented below a paragraph is an example, and code in
backticks may end within a word (`Op`s). reStructuredText wants both said.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_CODE = re.compile(r"(`[^`]+`)(?=(\w?))")


def as_restructured(lines: Sequence[str]) -> list[str]:
    """The lines of a docstring with `::` before examples, and the ends of code marked."""
    found: list[str] = []
    above = ""  # the last line that is not blank
    for line in _CODE.sub(_ended, "\n".join(lines)).split("\n"):
        if line.startswith("    ") and found and not found[-1] and above[:1] not in ("", " "):
            found += ["::", ""]
        found.append(line)
        above = line if line.strip() else above
    return found


def _ended(code: re.Match[str]) -> str:
    return f"{code[1]}\\ " if code[2] else code[1]


def setup(app: Any) -> None:
    """Register with a Sphinx application, before Google's sections are read."""

    def process(
        app: Any, what: str, name: str, obj: object, options: object, lines: list[str]
    ) -> None:
        lines[:] = as_restructured(lines)
        if what == "property":
            lines.insert(0, "")  # what stands before a colon in the first line counts as a type

    app.connect("autodoc-process-docstring", process, priority=100)
