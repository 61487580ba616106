"""Links of Markdown pages as the site has them.

Pages link files, as a code host wants it: `../README.md#install`, `../examples/moe.py`. On the site
the README is the first page, and what lies outside of `docs/` is linked where the repository is.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

import tomlkit

ROOT = Path(__file__).resolve().parents[1]
DOCS, FIRST = "docs", "docs/index.md"
"""The folder of the site, and its page that includes the README."""

_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")


def repository() -> str:
    """The address of the repository, as `pyproject.toml` names it."""
    described = tomlkit.parse((ROOT / "pyproject.toml").read_text(encoding="utf-8")).unwrap()
    address: str = described["project"]["urls"]["Repository"]
    return address


def for_site(text: str, page: str, shown_in: str, address: str) -> str:
    """A page's text with links that hold on the site.

    Args:
        text: Markdown.
        page: the file that it is from, from the root of the repository: `README.md`.
        shown_in: the folder of the page that shows it: `docs`.
        address: of the repository.
    """

    def target(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page), match[1]))
        anchor = match[2] or ""
        if path == "README.md":
            path = FIRST
        if path.startswith(f"{DOCS}/"):
            return posixpath.relpath(path, shown_in) + anchor
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"{address}/{kind}/main/{path}{anchor}"

    parts = _FENCE.split(text)  # code blocks at the odd places
    parts[::2] = [_LINK.sub(target, part) for part in parts[::2]]
    return "".join(parts)


def setup(app: Any) -> None:
    """Register with a Sphinx application: pages that are read, and those that are included."""
    address = repository()

    def read(app: Any, name: str, content: list[str]) -> None:
        page = f"{DOCS}/{name}.md"
        content[0] = for_site(content[0], page, posixpath.dirname(page), address)

    def include(app: Any, path: Path, name: str, content: list[str]) -> None:
        page = posixpath.normpath(posixpath.join(DOCS, path.as_posix()))
        shown_in = posixpath.dirname(f"{DOCS}/{name}")
        content[0] = for_site(content[0], page, shown_in, address)

    app.connect("source-read", read)
    app.connect("include-read", include)
