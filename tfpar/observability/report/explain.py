"""Explanation, as text, of how a plan treats one variable or layer."""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from tfpar.observability.report.data.schema import LayerSummary, Report, VariableSummary
from tfpar.observability.report.layer_rows import group_by_layer
from tfpar.observability.report.pipeline import ranks_text
from tfpar.observability.report.summary import simpler_than
from tfpar.spec import PlanError
from tfpar.spec.quantities import format_bytes, format_seconds


def explain(report: Report, name: str) -> str:
    """Explain the placement of variable or layer `name`: why, its readers, and the reshards.

    Args:
        name: a variable's path, or an end of it that no other variable's path has; or a layer's.

    Raises:
        PlanError: the plan has no such variable or layer, or several; names them, or the nearest.
    """
    found = _find(report, name)
    text = _variable(report, found) if isinstance(found, VariableSummary) else _layer(report, found)
    return "\n".join([text, *_memory_moves(report)])


def explain_as_data(report: Report, name: str) -> dict[str, Any]:
    """The same as JSON: the fields of the variable; or of the layer, with its variables and
    collectives; arguments and errors as of `explain`."""
    found = _find(report, name)
    if isinstance(found, VariableSummary):
        return {"variable": _as_json(found)}
    own = [variable for variable in report.variables if variable.layer == found.path]
    moved = group_by_layer(report.collectives).get(found.path, [])
    told: dict[str, Any] = _as_json({"layer": found, "variables": own, "collectives": moved})
    return told


def _as_json(found: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(found))


def _find(report: Report, name: str) -> VariableSummary | LayerSummary:
    """Find the variable or layer of this name; errors as of `explain`."""
    variables = {variable.path: variable for variable in report.variables}
    layers = {layer.path: layer for layer in report.layers}
    if not _ending(name, variables) and (ending := _ending(name, layers)):
        if len(ending) > 1 and name not in layers:
            raise PlanError(_several("layers", name, ending))
        return layers[name if name in layers else ending[0]]
    return variables[_full_name(name, variables, layers)]


def _ending(name: str, paths: Iterable[str]) -> list[str]:
    return [path for path in paths if path == name or path.endswith(f"/{name}")]


def _full_name(
    name: str, variables: dict[str, VariableSummary], layers: dict[str, LayerSummary]
) -> str:
    if name in variables:
        return name
    ending = _ending(name, variables)
    if len(ending) == 1:
        return ending[0]
    if ending:
        raise PlanError(_several("variables", name, ending))
    near = difflib.get_close_matches(name, [*variables, *layers], n=3, cutoff=0.3)
    hint = f" The nearest names: {', '.join(map(repr, near))}." if near else ""
    what = "variable or layer" if layers else "variable"
    raise PlanError(f"The plan has no {what} {name!r}.{hint}")


def _several(what: str, name: str, found: Sequence[str]) -> str:
    return (
        f"The plan has several {what} {name!r}, {len(found)} in all: {format_name_groups(found)}. "
        f"Give more of the path."
    )


def _memory_moves(report: Report) -> list[str]:
    """Format what was tried to make the plan fit into memory, in order."""
    moves = [candidate for candidate in report.candidates if candidate.kind == "move"]
    lines = ["  Tried to make the plan fit into memory:"] if moves else []
    for move in moves:
        told = ["fits" if move.fits else "does not fit"]
        if move.memory_bytes is not None:
            told.insert(0, format_bytes(move.memory_bytes))
        if move.seconds is not None:
            told.insert(0, format_seconds(move.seconds))
        lines.append(f"    {move.name}: {', '.join(told)}")
    return lines


# --- one variable -------------------------------------------------------------------


def _variable(report: Report, variable: VariableSummary) -> str:
    size = format_bytes(variable.num_bytes)
    lines = [f"Variable {variable.path!r}, {variable.dtype} {variable.shape}, {size}"]
    simpler = [f"  {line}" for line in simpler_than(report)]
    if variable.spec is None:
        left = "  Left to propagation: run a step, or pass what was partitioned."
        return "\n".join([*lines, *_stage(report, variable), left, *simpler])
    mesh = " x ".join(f"{axis.name}={axis.size}" for axis in report.facts.mesh)
    lines += [
        f"  Placement: {variable.placement} ({variable.spec} on {mesh})",
        f"  Per device: {variable.local_shape}, {format_bytes(variable.device_bytes or 0)}",
        *_stage(report, variable),
    ]
    if variable.gathered is not None:
        lines.append(
            f"  Layers read it as {variable.gathered}: gathered for each pass, let go after."
        )
    if variable.offloaded:
        lines.append("  Its optimizer slots lie in host memory between their uses.")
    lines += _options(report, variable)
    lines += simpler
    lines.append(f"  Why: {variable.why}")
    if not report.layers:
        return "\n".join(lines)
    lines.append("  Used by:" if variable.uses else "  Used by no op.")
    for use in variable.uses:
        said = " (as the plan says)" if use.planned else ""
        lines.append(f"    {use.type} {use.name!r}: {use.reads} -> {use.makes}{said}")
    lines += _more(variable.num_uses - len(variable.uses))
    lines.append("  Reshards around them:" if variable.reshards else "  No reshard around them.")
    lines += [f"    {text}" for text in variable.reshards]
    return "\n".join([*lines, *_more(variable.num_reshards - len(variable.reshards))])


def _stage(report: Report, variable: VariableSummary) -> list[str]:
    """Return the stage of a pipeline that owns the variable."""
    if report.pipeline is None or variable.stage is None:
        return []
    stages = report.pipeline.stages
    ranks = ranks_text(stages[variable.stage].ranks)
    return [f"  Stage: {variable.stage} of {len(stages)}, on ranks {ranks}"]


def _options(report: Report, variable: VariableSummary) -> list[str]:
    """Format the other specs that the planner priced for the variable, the runner-up first."""
    if report.cost is None or not variable.options:
        return []
    best = report.cost.seconds
    lines = [f"  Step with it as chosen: {format_seconds(best)}; otherwise, at best:"]
    for other in variable.options:
        text = "not valid"
        if other.seconds is not None:
            text = format_seconds(other.seconds)
            if best > 0:
                text += f" ({100 * (other.seconds - best) / best:+.1f} %)"
        where = f" on {other.layout}" if other.layout else ""
        lines.append(f"    {other.placement}{where}: {text}")
    return lines


def _more(count: int) -> list[str]:
    return [f"    and {count} more"] if count > 0 else []


# --- one layer ----------------------------------------------------------------------


def _layer(report: Report, layer: LayerSummary) -> str:
    title = f" ({layer.class_name})" if layer.class_name else ""
    made = f", made in {layer.source}" if layer.source else ""
    lines = [
        f"Layer {layer.path!r}{title}{made}: {layer.ops} ops, {format_bytes(layer.memory.total)} "
        f"on a device when it stores most, {format_seconds(layer.total_s)} of a step"
    ]
    if layer.repeat is not None:
        lines.append(
            f"  One of {layer.repeat.of} that are alike, in {layer.repeat.name}: "
            f"number {layer.repeat.instance}"
        )
    for variable in report.variables:
        if variable.layer == layer.path and variable.kind == "weight":
            lines.append(f"  {variable.path} {variable.shape}: {variable.placement}")
            lines += [f"  {line}" for line in _stage(report, variable)]
            lines += [f"  {line}" for line in _options(report, variable)]
    if layer.patterns:
        lines.append("  Sharding patterns, each by itself:")
        lines += [f"    {pattern}" for pattern in layer.patterns]
    moved = group_by_layer(report.collectives).get(layer.path, [])
    lines.append("  Collectives:" if moved else "  No collectives.")
    lines += [
        f"    {one.count} {one.kind} over {' x '.join(one.axes)} ({one.phase}, "
        f"{format_bytes(one.num_bytes)}, {format_seconds(one.seconds)})"
        for one in moved
    ]
    return "\n".join(lines)


# --- Grouping of names that differ in one number ---

_NUMBER = re.compile(r"(\d+)")

MOST_GROUPS = 12
"""How many groups are shown: a model's unlike layers are seldom more."""


def format_name_groups(names: Iterable[str]) -> str:
    """`'block_0..block_11/fc1/kernel' (12), 'head/kernel'`: each group, and how many it is."""
    groups = group_names(names)
    shown = [_text(group) for group in groups[:MOST_GROUPS]]
    left = len(groups) - len(shown)
    return ", ".join(shown) + (f" and {left} more such groups" if left else "")


def group_names(names: Iterable[str]) -> list[list[str]]:
    """The names by what they are but for one number, each group in the order of that number.

    Of several numbers that differ, the one with most values varies within a group. A part without a
    number at its end is the first of those with one, as Keras counts them: `dense`, `dense_1`.
    """
    alike: dict[tuple[str, ...], dict[tuple[int, ...], str]] = defaultdict(dict)
    for name in names:
        texts, numbers = _parts(name)
        alike[texts][numbers] = name
    found = []
    for members in alike.values():
        values = [set(column) for column in zip(*members, strict=True)]
        varies = max(range(len(values)), key=lambda i: (len(values[i]), -i))
        apart: dict[tuple[int, ...], list[tuple[int, str]]] = defaultdict(list)
        for numbers, name in members.items():
            others = (*numbers[:varies], *numbers[varies + 1 :])
            apart[others].append((numbers[varies], name))
        found += [[name for _, name in sorted(group)] for group in apart.values()]
    return found


def _parts(name: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Split a name into texts and the numbers between; -1 where a part ends without one."""
    texts: list[str] = []
    numbers: list[int] = []
    for part in name.split("/"):
        counted = part if re.search(r"_\d+$", part) else f"{part}_"
        pieces = _NUMBER.split(counted)
        texts += pieces[::2]
        numbers += map(int, pieces[1::2])
        if counted != part:
            numbers.append(-1)
            texts.append("")
    return tuple(texts), tuple(numbers)


def _text(group: Sequence[str]) -> str:
    if len(group) <= 2:  # a range would say less, and is hardly shorter
        return ", ".join(map(repr, group))
    first, last = group[0].split("/"), group[-1].split("/")
    parts = (a if a == b else f"{a}..{b}" for a, b in zip(first, last, strict=True))
    return f"{'/'.join(parts)!r} ({len(group)})"
