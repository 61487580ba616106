"""Tables of a full summary besides layers: variables, inputs, collectives, padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tfpar.observability.report.data.schema import Collective, Padding, Report, VariableSummary
from tfpar.observability.report.tables import render_table
from tfpar.observability.report.variables import local_text
from tfpar.spec.quantities import format_bytes, format_seconds


def details(report: Report) -> list[str]:
    """The tables, one after the other."""
    parts = [_variable_table(report), totals(report)]
    if report.facts.fixed_tensors:
        rows = [[name, placement] for name, placement in report.facts.fixed_tensors.items()]
        parts.append(
            render_table("Activations fixed by constraints", ("Tensor", "Placement"), rows)
        )
    return [*parts, *(_of_the_step(report) if report.layers else ())]


def totals(report: Report) -> str:
    """Bytes of all variables, and what a device has of them."""
    whole = sum(variable.num_bytes for variable in report.variables)
    weights = [variable for variable in report.variables if variable.kind == "weight"]
    text = (
        f"Total: {format_bytes(whole)} in {len(report.variables)} variables (weights "
        f"{format_bytes(sum(variable.num_bytes for variable in weights))})"
    )
    if report.pipeline is not None:
        return text
    local = [variable.device_bytes for variable in report.variables]
    known = [size for size in local if size is not None]
    return f"{text}; per device {format_bytes(sum(known)) if len(known) == len(local) else '?'}"


def _of_the_step(report: Report) -> Iterator[str]:
    yield from _inputs(report)
    yield from _planned_ops(report)
    if report.padding is not None:
        yield _padding(report.padding)
    yield _collectives(report)
    yield _fallbacks(report)
    if report.run_whole:
        rows = [[found.type, found.axis, found.op] for found in report.run_whole]
        title = (
            "Loops, branches and calls that run whole along an axis: their bodies need collectives"
        )
        yield render_table(title, ("Op type", "Mesh axis", "Op"), rows)


def _variable_table(report: Report) -> str:
    rows = []
    rest: list[VariableSummary] = []
    staged = report.pipeline is not None
    for variable in report.variables:
        if variable.kind == "state" and not variable.fixed:
            rest.append(variable)
            continue
        laid = "left to propagation" if variable.placement is None else variable.placement
        size, local = format_bytes(variable.num_bytes), local_text([variable])
        stage = _stages_of([variable]) if staged else []
        rows.append([variable.path, str(variable.shape), laid, *stage, size, local])
    if rest:
        # No rank of a pipeline holds all of them; the table of stages says what each does.
        local = "" if staged else local_text(rest)
        size = format_bytes(sum(variable.num_bytes for variable in rest))
        head = f"{len(rest)} optimizer and other state"
        rows.append(
            [head, "", _placement(rest), *(_stages_of(rest) if staged else []), size, local]
        )
    columns = ["Variable", "Shape", "Placement", "Bytes", "Per device"]
    if staged:
        columns.insert(3, "Stage")
    return render_table("Variables", columns, rows, numeric=(len(columns) - 2, len(columns) - 1))


def _placement(variables: Sequence[VariableSummary]) -> str:
    if any(variable.placement is None for variable in variables):
        return "left to propagation"
    sharded = sum("S(" in (variable.spec or "") for variable in variables)
    return f"{sharded} sharded, as their weights" if sharded else "replicated"


def _stages_of(variables: Sequence[VariableSummary]) -> list[str]:
    """A cell with the stages of these variables."""
    found = {variable.stage for variable in variables if variable.stage is not None}
    return [f"{min(found)}-{max(found)}" if len(found) > 1 else "".join(map(str, found))]


def _inputs(report: Report) -> Iterator[str]:
    if report.inputs:
        rows = [[one.name, str(one.shape), one.given, one.taken] for one in report.inputs]
        columns = ("Input", "Shape", "A rank is given", "Its ops take")
        yield render_table("Inputs of the step", columns, rows)


def _planned_ops(report: Report) -> Iterator[str]:
    """The ops that the plan itself decides, by how many of a type."""
    counts = [*report.planned_ops.items()]
    if counts:
        shown = ", ".join(f"{count} {kind}" for kind, count in counts[:4])
        more = ", ..." if len(counts) > 4 else ""
        yield (
            f"Ops that run as the plan says, where by themselves they would run otherwise: "
            f"{sum(count for _, count in counts)} ({shown}{more})"
        )


def _padding(padding: Padding) -> str:
    names = padding.variables
    if not names and not padding.tensors:
        return "Padding: none, every split divides"
    lines = ["Padding where sizes do not divide:"]
    if names:
        shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
        lines.append(f"  {len(names)} variables, {format_bytes(padding.num_bytes)} in all: {shown}")
    if padding.tensors:
        lines.append(f"  {padding.tensors} activations and gradients")
    return "\n".join(lines)


def _collectives(report: Report) -> str:
    found: dict[tuple[str, tuple[str, ...]], list[Collective]] = {}
    for one in report.collectives:
        found.setdefault((one.kind, one.axes), []).append(one)
    if not found:
        return "Collectives of one step: none"
    rows = [
        [
            kind,
            " x ".join(axes),
            str(sum(one.count for one in alike)),
            format_bytes(sum(one.num_bytes for one in alike)),
            *([format_seconds(sum(one.alone_s for one in alike))] if report.machines else []),
        ]
        for (kind, axes), alike in sorted(found.items())
    ]
    columns = ["Collective", "Over", "Count", "Bytes per rank", "Time"][: len(rows[0])]
    title = "Collectives of one step (before those of one kind and group are packed)"
    return render_table(title, columns, rows, numeric=range(2, len(columns)))


def _fallbacks(report: Report) -> str:
    if not report.without_rule:
        return "Fallbacks: none, every op has a rule"
    rows = [[found.type, str(found.count), found.first] for found in report.without_rule]
    title = "Ops run replicated for want of a rule (inputs gathered, every rank computes)"
    return render_table(title, ("Op type", "Count", "First op"), rows, numeric=(1,))
