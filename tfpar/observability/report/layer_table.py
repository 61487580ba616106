"""The layers of a plan as people think of them: a block that repeats is shown once.

    block_* x12 (Block)                                7.1 M   1.2 GiB                  31 ms
      attention/query (EinsumDense)   S(1) over model  ...

A block's rows stand for all its instances: their weights, bytes and seconds are added up, so that
the column of times comes to that of the step.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tfpar.observability.report.data.schema import LayerSummary, Report, VariableSummary
from tfpar.observability.report.layer_rows import Row, between_row, costliest_kind, rows_table
from tfpar.observability.report.tables import render_table
from tfpar.observability.report.variables import local_text
from tfpar.spec.quantities import format_bytes

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
