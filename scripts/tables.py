"""Markdown tables, and the line that says what a table was made with."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def code(names: Iterable[str]) -> str:
    return ", ".join(f"`{n}`" for n in names)


def made_with(*packages: str) -> str:
    """`2026-01-31, TensorFlow 2.21.0, ...`: for tables that take a while to make."""
    from importlib.metadata import version

    today = datetime.date.today().isoformat()
    return ", ".join([today, *(f"{p} {version(p)}" for p in packages)])
