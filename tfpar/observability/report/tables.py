"""Tables as plain text."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

WIDTH = 120


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
        file=stream,
        width=WIDTH,
        no_color=True,
        markup=False,
        highlight=False,
        emoji=False,
        force_terminal=False,
        force_jupyter=False,  # there it would be shown, and not be part of the text
    )
    console.print(table)
    return "\n".join([title, *(line.rstrip() for line in stream.getvalue().splitlines())])
