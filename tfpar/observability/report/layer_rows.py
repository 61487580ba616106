"""Rows of layers, each by itself or a repeated block as one, and the tables of all of them."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from tfpar.observability.report.data.schema import Collective, LayerSummary, Report, VariableSummary
from tfpar.observability.report.tables import render_table
from tfpar.observability.report.variables import local_text
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


# --- repeated blocks ------------------------------------------------------------------------
# The layers of a plan as people think of them: a block that repeats is shown once.
#
#     block_* x12 (Block)                                7.1 M   1.2 GiB                  31 ms
#       attention/query (EinsumDense)   S(1) over model  ...
#
# A block's rows stand for all its instances: their weights, bytes and seconds are added up, so that
# the column of times comes to that of the step.

MOST_VARIABLES = 20


def layers_table(report: Report, sort: str | None, most_rows: int) -> str:
    """The table of layers, blocks that repeat as one.

    Args:
        most_rows: beside the last, which is what all come to.
    """
    groups = _groups(report.layers)
    groups.sort(key=lambda rows: rows[0].key(sort))
    rows = [row for group in groups for row in _sorted(group, sort)]
    if len(rows) > most_rows:  # without what is in blocks
        rows = [group[0] for group in groups]
    if len(rows) > most_rows:
        rows = _largest(rows, most_rows)
    blocks = "; blocks that repeat added up" if any(_is_block(group) for group in groups) else ""
    return rows_table(report, rows, costliest_kind, blocks)


def _groups(layers: Sequence[LayerSummary]) -> list[list[Row]]:
    """A list of rows for each block that repeats, itself the first, and for each other layer."""
    found: dict[object, list[LayerSummary]] = {}
    for layer in layers:
        key: object = layer.path if layer.weights else None
        if layer.repeat is not None:
            key = layer.repeat.block
        found.setdefault(key, []).append(layer)
    between = found.pop(None, [])
    groups = [_block(own) if own[0].repeat else [_single(own[0])] for own in found.values()]
    return [*groups, [between_row(between)]] if between else groups


def _single(layer: LayerSummary) -> Row:
    return Row(layer.path, layer.class_name, [layer])


def _block(layers: list[LayerSummary]) -> list[Row]:
    """Make the rows of a block: its sum, its members that have weights, and the others as one."""
    repeat = layers[0].repeat
    assert repeat is not None
    members: dict[int, list[LayerSummary]] = {}
    for layer in layers:
        if layer.repeat is not None:
            members.setdefault(layer.repeat.member, []).append(layer)
    whole = Row(f"{repeat.name} x{repeat.of}", "", layers)
    weighted = [own for own in members.values() if own[0].weights]
    if len(weighted) == 1 and len(members) == 1:
        return [Row(whole.name, layers[0].class_name, layers)]
    rows = [Row(_within(own[0]), own[0].class_name, own, 1) for own in weighted]
    others = [layer for own in members.values() if not own[0].weights for layer in own]
    return [whole, *rows, *([between_row(others, 1)] if others else [])]


def _within(layer: LayerSummary) -> str:
    """The path of a layer below its block's."""
    assert layer.repeat is not None
    holder = re.match(re.escape(layer.repeat.name).replace(r"\*", "[^/_]*"), layer.path)
    below = "" if holder is None else layer.path[holder.end() :].lstrip("/_.-")
    return below or layer.path


def _is_block(group: Sequence[Row]) -> bool:
    return group[0].layers[0].repeat is not None


def _sorted(group: list[Row], sort: str | None) -> list[Row]:
    """A block stays above its members."""
    return [group[0], *sorted(group[1:], key=lambda row: row.key(sort))]


def _largest(rows: list[Row], count: int) -> list[Row]:
    """Keep the rows with most time or memory, in their order; the others become one."""
    kept = sorted(rows, key=lambda row: (-row.seconds, -row.memory_bytes))[: count - 1]
    shown = [row for row in rows if row in kept]
    others = [row for row in rows if row not in kept]
    layers = [layer for row in others for layer in row.layers]
    return [*shown, Row(f"{len(layers)} more layers", "", layers)]


# --- where nothing but variables is known -------------------------------------------


_numbers = re.compile(r"\d+")


def folded_variables(report: Report) -> str:
    """Format the variables; those placed equally, whose paths differ in numbers only, as one."""
    alike: dict[tuple[object, ...], list[VariableSummary]] = {}
    for variable in report.variables:
        if variable.kind == "weight" or variable.spec is not None:
            key = _numbers.sub("*", variable.path), variable.shape, variable.spec
            alike.setdefault((*key, variable.stage), []).append(variable)
    rows = [_variable_row(report, found) for found in [*alike.values()][: MOST_VARIABLES + 1]]
    if len(alike) > MOST_VARIABLES + 1:
        rows[-1] = [f"{len(alike) - MOST_VARIABLES} more (full=True shows them)", *[""] * 4]
    columns = ["Variable", "Shape", "Placement", "Bytes", "Per device"]
    return render_table("Variables", columns, rows, numeric=(3, 4))


def _variable_row(report: Report, variables: Sequence[VariableSummary]) -> list[str]:
    first = variables[0]
    name = first.path
    if len(variables) > 1:
        name = f"{_numbers.sub('*', name)} x{len(variables)}"
    size = format_bytes(sum(variable.num_bytes for variable in variables))
    laid = first.placement or "left to propagation"
    return [name, str(first.shape), laid, size, local_text(variables)]
