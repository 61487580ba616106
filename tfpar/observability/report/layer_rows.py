"""Rows of layers, each by itself or several as one, and the table of all of them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from tfpar.observability.report.data.schema import Collective, LayerSummary, Report
from tfpar.observability.report.tables import render_table
from tfpar.spec.quantities import format_bytes, format_seconds

COLUMNS = ("Layer (class)", "Placement", "Weights", "Memory", "Collectives", "Time")
NUMERIC = (2, 3, 5)
MOST_TITLE = 32
"""Characters of a layer's name with its class: a longer one stands without."""


@dataclasses.dataclass
class Row:
    """Row of a table that stands for one or more layers.

    Attributes:
        name: what they are called.
        class_name: of the Keras layer; empty where they have several.
        layers: at least one.
        depth: how far the name is indented.
    """

    name: str
    class_name: str
    layers: list[LayerSummary]
    depth: int = 0

    @property
    def seconds(self) -> float:
        """Seconds of all its layers."""
        return sum(layer.total_s for layer in self.layers)

    @property
    def memory_bytes(self) -> float:
        """Bytes of all its layers."""
        return sum(layer.memory.total for layer in self.layers)

    def key(self, sort: str | None) -> float:
        """Return the key by which rows are sorted, the least first."""
        return -(self.memory_bytes if sort == "memory" else self.seconds if sort else 0.0)

    def cells(
        self,
        moved: dict[str, list[Collective]],
        tell: Callable[[Iterable[Collective]], str],
    ) -> list[str]:
        """The row of a table.

        Args:
            moved: the collectives of each layer, by its path.
            tell: says in words what some collectives are.
        """
        title = f"{self.name} ({self.class_name})" if self.class_name else self.name
        if len(title) > MOST_TITLE:
            title = self.name
        weights = sum(layer.weights for layer in self.layers)
        return [
            "  " * self.depth + title,
            placements_text(layer.placement for layer in self.layers),
            f"{weights:,}" if weights else "",
            format_bytes(self.memory_bytes),
            tell(c for layer in self.layers for c in moved.get(layer.path, ())),
            format_seconds(self.seconds),
        ]


def placements_text(placements: Iterable[str]) -> str:
    """`S(0), S(1) over model`: how weights of some layers are split, axis by axis."""
    by_axis: dict[str, dict[str, None]] = {}
    known = [part for placement in placements for part in placement.split("; ") if part]
    for part in sorted(set(known) - {"replicated"}):
        for one in part.split(", "):
            split, _, axis = one.partition(" over ")
            by_axis.setdefault(axis, {})[split] = None
    found = [f"{', '.join(splits)} over {axis}" for axis, splits in by_axis.items()]
    return "; ".join(found) or ("replicated" if known else "")


def collectives_text(collectives: Iterable[Collective]) -> str:
    """`2 all_reduce over model`, one kind after the other."""
    counts: Counter[tuple[str, str]] = Counter()
    for one in collectives:
        counts[one.kind, " x ".join(one.axes)] += one.count
    return ", ".join(f"{count} {kind} over {axes}" for (kind, axes), count in counts.items())


def costliest_kind(collectives: Iterable[Collective]) -> str:
    """`24 all_reduce, ...`: how many there are of the kind that takes most time."""
    seconds: dict[str, float] = {}
    counts: Counter[str] = Counter()
    for one in collectives:
        seconds[one.kind] = seconds.get(one.kind, 0.0) + one.seconds
        counts[one.kind] += one.count
    if not seconds:
        return ""
    dearest = max(seconds, key=seconds.__getitem__)
    return f"{counts[dearest]} {dearest}{', ...' if len(seconds) > 1 else ''}"


def group_by_layer(collectives: Sequence[Collective]) -> dict[str, list[Collective]]:
    """Collectives by the path of the layer whose tensors they move."""
    found: dict[str, list[Collective]] = {}
    for one in collectives:
        if one.layer is not None:
            found.setdefault(one.layer, []).append(one)
    return found


def every_layer(report: Report, sort: str | None) -> str:
    """Format every layer that has weights, and the layers between them as one row."""
    rows = [Row(layer.path, layer.class_name, [layer]) for layer in report.layers if layer.weights]
    rows.sort(key=lambda row: row.key(sort))
    between = [layer for layer in report.layers if not layer.weights]
    if between:
        rows.append(between_row(between))
    return rows_table(report, rows, collectives_text)


def between_row(layers: list[LayerSummary], depth: int = 0) -> Row:
    """Layers without weights, as one row."""
    count = sum(layer.ops for layer in layers)
    return Row(f"{count} ops between them", "", layers, depth)


def rows_table(
    report: Report,
    rows: Sequence[Row],
    tell: Callable[[Iterable[Collective]], str],
    also: str = "",
) -> str:
    """The table of these rows, with a line of what all layers come to.

    Args:
        tell: as of `Row.cells`.
        also: what is said in the title besides.
    """
    moved = group_by_layer(report.collectives)
    cells = [row.cells(moved, tell) for row in rows]
    if report.pipeline is None and report.cost is not None:
        whole = Row("Together", "", list(report.layers)).cells({}, tell)
        cells.append([whole[0], "", *whole[2:]])
    if report.machines is None:
        title = f"Layers (memory of a device for weights and slots; nothing was priced{also})"
        return render_table(title, COLUMNS[:-1], [row[:-1] for row in cells], numeric=NUMERIC[:-1])
    device = "a device of its stage" if report.pipeline is not None else "a device"
    title = (
        f"Layers (memory when {device} stores most; time of ops and of what is waited for{also})"
    )
    return render_table(title, COLUMNS, cells, numeric=NUMERIC)
