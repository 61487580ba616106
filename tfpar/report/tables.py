"""Tables and numbers as plain text."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

WIDTH = 120
_UNITS = ("B", "KB", "MB", "GB", "TB")


def render_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], numeric: Sequence[int] = ()
) -> str:
    """A table as text without colours, at most `WIDTH` wide; `numeric` columns align right."""
    table = Table(box=box.ASCII2, header_style="")
    for i, name in enumerate(columns):
        right = i in numeric
        table.add_column(name, justify="right" if right else "left", no_wrap=right, overflow="fold")
    for row in rows:
        table.add_row(*row)
    stream = io.StringIO()
    console = Console(
        file=stream, width=WIDTH, no_color=True, markup=False, highlight=False, emoji=False,
        force_terminal=False,
    )  # fmt: skip
    console.print(table)
    return "\n".join([title, *(line.rstrip() for line in stream.getvalue().splitlines())])


def format_bytes(count: int) -> str:
    """`1.5 MB` (1 MB is 1024 KB)."""
    size = float(count)
    for unit in _UNITS:
        if size < 1024 or unit == _UNITS[-1]:
            break
        size /= 1024
    return f"{count} B" if unit == "B" else f"{size:.2f} {unit}"


def format_seconds(seconds: float) -> str:
    """`1.25 ms`."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale or unit == "us":
            break
    return f"{seconds / scale:.2f} {unit}"
