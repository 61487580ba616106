"""Tables of results, how their cells read, and where they come from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks.results import Result
from scripts.tables import markdown_table

Row = dict[str, Any]
Column = tuple[str, Callable[[Row], str]]


def table(
    columns: Sequence[Column], choose: Callable[[Row], bool] = lambda _: True
) -> Callable[[Result], str]:
    """A table of the rows of a result, and where it comes from."""

    def text(result: Result) -> str:
        rows = [[cell(row) for _, cell in columns] for row in result.rows if choose(row)]
        return with_source([name for name, _ in columns], rows, result)

    return text


def with_source(heads: Sequence[str], rows: Iterable[Sequence[str]], result: Result) -> str:
    """A table of cells that are there, and where they come from."""
    return f"\n{markdown_table(heads, rows)}\n\n{source(result)}\n"


def source(result: Result) -> str:
    """What was run, when, on which commit, on how slow a machine."""
    parts = [f"`{result.command}`", *measured(vars(result)), result.note]
    return f"{', '.join(filter(None, parts))}."


def measured(of: Mapping[str, Any]) -> list[str]:
    """When a result or a row of its own was measured, on which commit, on how slow a machine."""
    commit, machine = of["commit"], of.get("machine")
    parts = [of["date"], commit and f"commit {commit}"]
    return [*filter(None, parts), *([f"machine {machine:.2f}"] if machine else [])]


def number(key: str, form: str = "", scale: float = 1) -> Callable[[Row], str]:
    """A field of a row, times `scale`; `-` if it has none."""

    def cell(row: Row) -> str:
        value = row.get(key)
        return "-" if value is None else format(value * scale, form)

    return cell


def text(key: str) -> Callable[[Row], str]:
    """A field of a row as it is."""
    return lambda row: str(row[key])


def count(number: float) -> str:
    """`738 M`, `1.31 B`."""
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.0f} M"


def short(seconds: float) -> str:
    """One digit behind the point, from ten on none."""
    return f"{seconds:.1f}" if seconds < 10 else f"{seconds:.0f}"
