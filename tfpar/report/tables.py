"""Tables and numbers as plain text."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

WIDTH = 120
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


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


def format_bytes(count: float) -> str:
    """`1.50 MiB` (1 MiB is 1024 KiB), rounded up: what is printed, given as a limit, is enough."""
    if math.isinf(count):
        return "inf B"
    whole = math.ceil(count)
    power = min(max(whole.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    if power == 0:
        return f"{whole} B"
    hundredths = -(-100 * whole // 1024**power)
    return f"{hundredths // 100}.{hundredths % 100:02d} {_UNITS[power]}"


def format_seconds(seconds: float) -> str:
    """`1.25 ms`."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale or unit == "us":
            break
    return f"{seconds / scale:.2f} {unit}"
