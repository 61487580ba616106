"""Tables of results, how their cells read, and where they come from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.results import Result
from scripts.tables import markdown_table

Row = dict[str, Any]
Column = tuple[str, Callable[[Row], str]]


def table(
    columns: Sequence[Column], choose: Callable[[Row], bool] = lambda _: True
) -> Callable[[Result], str]:
    """A table of the rows of a result, and where it comes from."""
    scaled = [name for name, cell in columns if isinstance(cell, Taken)]

    def text(result: Result) -> str:
        chosen = [{"machine": result.machine, **row} for row in result.rows if choose(row)]
        rows = [[cell(row) for _, cell in columns] for row in chosen]
        known = scaled if any(row["machine"] for row in chosen) else ()
        return with_source([name for name, _ in columns], rows, result, known)

    return text


def with_source(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    result: Result,
    scaled: Sequence[str] = (),
) -> str:
    """A table of cells that are there, and where they come from.

    Args:
        scaled: the heads of columns of seconds that are scaled to the reference machine.
    """
    return f"\n{markdown_table(heads, rows)}\n\n{source(result, scaled)}\n"


def source(result: Result, scaled: Sequence[str] = ()) -> str:
    """What was run, when, on which commit, on how slow a machine; `scaled` as of `with_source`."""
    parts = [f"`{result.command}`", *measured(vars(result)), result.note]
    text = f"{', '.join(filter(None, parts))}."
    if not scaled:
        return text
    names = ", ".join(f"*{name}*" for name in scaled)
    return f"{text} {names}: as the reference machine would take, `python -m benchmarks.machine`."


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


class Taken(NamedTuple):
    """A cell of seconds that were measured: as many as the reference machine would have taken, if
    it is known how slow the machine was (`benchmarks.machine`).

    Attributes:
        key, form, scale: as of `number`.
    """

    key: str
    form: str = ""
    scale: float = 1

    def __call__(self, row: Row) -> str:
        return number(self.key, self.form, self.scale / (row.get("machine") or 1.0))(row)


def text(key: str) -> Callable[[Row], str]:
    """A field of a row as it is."""
    return lambda row: str(row[key])


def count(number: float) -> str:
    """`738 M`, `1.31 B`."""
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.0f} M"


def short(seconds: float) -> str:
    """One digit behind the point, from ten on none."""
    return f"{seconds:.1f}" if seconds < 10 else f"{seconds:.0f}"
