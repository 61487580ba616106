"""What a plan does, as text: `summary` for the whole step, `explain` for one variable."""

from __future__ import annotations

import collections
import difflib
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tfpar.ir.graph import Op, Tensor, Variable, itemsize
from tfpar.propagation.follow import followed_weights
from tfpar.report.tables import format_bytes, render_table
from tfpar.spec import (
    Mesh,
    PlanError,
    Replicate,
    Shard,
    Spec,
    dim_is_even,
    format_spec,
    local_shape,
)

if TYPE_CHECKING:
    from tfpar.plan import Plan, PlannedVariable
    from tfpar.propagation.engine import PartitionedGraph, Reshard

_MAX_LINES = 12
_RELABELS = frozenset({"ReadVariableOp", "Identity", "Cast"})


def summary(plan: Plan, partitioned: PartitionedGraph | None = None) -> str:
    """The plan as tables: placements and bytes; with `partitioned` also what one step moves."""
    batch = " and ".join(plan.batch_axes)
    ranks = f"{plan.mesh.size} rank{'s' if plan.mesh.size > 1 else ''}"
    parts = [
        f"Plan on mesh {plan.mesh} ({ranks}), "
        + (f"batch split over {batch}" if batch else "batch not split"),
        _variable_table(plan, partitioned),
        _totals(plan, partitioned),
    ]
    if plan.tensors:
        rows = [[n, placement_text(s, plan.mesh)] for n, s in sorted(plan.tensors.items())]
        parts.append(
            render_table("Activations fixed by constraints", ("Tensor", "Placement"), rows)
        )
    if partitioned is not None:
        parts += [_padding(plan, partitioned), _collectives(partitioned), _fallbacks(partitioned)]
        if partitioned.held:
            parts.append(_held(partitioned))
    return "\n".join(parts)


def placement_text(spec: Spec, mesh: Mesh) -> str:
    """`S(1) over model`, axis by axis; `replicated` where no axis does anything."""
    texts = [
        f"{placement} over {name}"
        for placement, name, size in zip(spec, mesh.axis_names, mesh.shape, strict=True)
        if not isinstance(placement, Replicate) and size > 1
    ]
    return ", ".join(texts) or "replicated"


# --- variables -------------------------------------------------------------------


def _specs(plan: Plan, partitioned: PartitionedGraph | None) -> dict[str, Spec | None]:
    """The spec of each variable, as propagation left it where that is known."""
    specs = {name: variable.spec for name, variable in plan.variables.items()}
    if partitioned is not None:
        specs.update({v.name: s for v, s in partitioned.variable_specs.items()})
    return specs


def _num_bytes(variable: PlannedVariable) -> int:
    return math.prod(variable.shape) * itemsize(variable.dtype)


def _local_bytes(variable: PlannedVariable, spec: Spec, mesh: Mesh) -> int:
    return math.prod(local_shape(variable.shape, spec, mesh)) * itemsize(variable.dtype)


def _variable_table(plan: Plan, partitioned: PartitionedGraph | None) -> str:
    specs = _specs(plan, partitioned)
    rows = []
    rest: list[str] = []
    for name, variable in plan.variables.items():
        if not variable.trainable and variable.spec is None:
            rest.append(name)
            continue
        spec = specs[name]
        rows.append(
            [
                name,
                str(variable.shape),
                "left to propagation" if spec is None else placement_text(spec, plan.mesh),
                format_bytes(_num_bytes(variable)),
                _local_text(plan, [name], specs),
            ]
        )
    if rest:
        sharded = sum(any(isinstance(p, Shard) for p in specs[n] or ()) for n in rest)
        total = sum(_num_bytes(plan.variables[n]) for n in rest)
        placement = f"{sharded} sharded, as their weights" if sharded else "replicated"
        if any(specs[n] is None for n in rest):
            placement = "left to propagation"
        rows.append(
            [
                f"{len(rest)} optimizer and other state",
                "",
                placement,
                format_bytes(total),
                _local_text(plan, rest, specs),
            ]
        )
    columns = ("Variable", "Shape", "Placement", "Bytes", "Per device")
    return render_table("Variables", columns, rows, numeric=(3, 4))


def _local_text(plan: Plan, names: Sequence[str], specs: dict[str, Spec | None]) -> str:
    total = 0
    for name in names:
        spec = specs[name]
        if spec is None:
            return "?"
        total += _local_bytes(plan.variables[name], spec, plan.mesh)
    return format_bytes(total)


def _totals(plan: Plan, partitioned: PartitionedGraph | None) -> str:
    specs = _specs(plan, partitioned)
    whole = sum(map(_num_bytes, plan.variables.values()))
    weights = sum(_num_bytes(v) for v in plan.variables.values() if v.trainable)
    return (
        f"Total: {format_bytes(whole)} in {len(plan.variables)} variables (weights "
        f"{format_bytes(weights)}); per device {_local_text(plan, list(plan.variables), specs)}"
    )


# --- what one step does ----------------------------------------------------------


def _padding(plan: Plan, partitioned: PartitionedGraph) -> str:
    mesh = partitioned.mesh
    padded = [v for v, s in partitioned.variable_specs.items() if _is_padded(v.shape, s, mesh)]
    handles = {v.handle for v in partitioned.graph.variables}
    seen: dict[tuple, bool] = {}
    tensors = 0
    for tensor, spec in partitioned.specs.items():
        if tensor in handles or not tensor.is_static:
            continue
        key = (tensor.shape, spec)
        if key not in seen:
            seen[key] = _is_padded(tensor.shape, spec, mesh)
        tensors += seen[key]
    if not padded and not tensors:
        return "Padding: none, every split divides"
    extra = sum(
        math.prod(local_shape(v.shape, partitioned.variable_specs[v], mesh)) * itemsize(v.dtype)
        * _num_shards(partitioned.variable_specs[v], mesh)
        - v.num_bytes
        for v in padded
    )  # fmt: skip
    names = ", ".join(v.name for v in padded[:4]) + (", ..." if len(padded) > 4 else "")
    lines = ["Padding where sizes do not divide:"]
    if padded:
        lines.append(f"  {len(padded)} variables, {format_bytes(extra)} in all: {names}")
    if tensors:
        lines.append(f"  {tensors} activations and gradients")
    return "\n".join(lines)


def _num_shards(spec: Spec, mesh: Mesh) -> int:
    return mesh.group_size(tuple(a for a, p in enumerate(spec) if isinstance(p, Shard)))


def _is_padded(shape: Sequence[int], spec: Spec, mesh: Mesh) -> bool:
    dims = {p.dim for p in spec if isinstance(p, Shard)}
    return any(not dim_is_even(shape, spec, mesh, d) for d in dims)


def _collectives(partitioned: PartitionedGraph) -> str:
    count: collections.Counter = collections.Counter()
    size: collections.Counter = collections.Counter()
    for kind, axes, num_bytes in partitioned.collectives():
        count[kind, axes] += 1
        size[kind, axes] += num_bytes
    if not count:
        return "Collectives of one step: none"
    rows = [
        [kind, " x ".join(axes), str(count[kind, axes]), format_bytes(size[kind, axes])]
        for kind, axes in sorted(count)
    ]
    columns = ("Collective", "Over", "Count", "Bytes per rank")
    title = "Collectives of one step (before all-reduces of one group are packed)"
    return render_table(title, columns, rows, numeric=(2, 3))


def _fallbacks(partitioned: PartitionedGraph) -> str:
    by_type: dict[str, list[Op]] = {}
    for op in partitioned.prepared.all_fallbacks():
        by_type.setdefault(op.type, []).append(op)
    if not by_type:
        return "Fallbacks: none, every op has a rule"
    rows = [[t, str(len(ops)), ops[0].name] for t, ops in sorted(by_type.items())]
    title = "Ops run replicated for want of a rule (inputs gathered, every rank computes)"
    return render_table(title, ("Op type", "Count", "First op"), rows, numeric=(1,))


def _held(partitioned: PartitionedGraph) -> str:
    axes = partitioned.mesh.axis_names
    rows = [[op.type, axes[axis], op.name] for op, axis in partitioned.held]
    title = "Loops, branches and calls that run whole along an axis: their bodies need collectives"
    return render_table(title, ("Op type", "Mesh axis", "Op"), rows)


# --- one variable ----------------------------------------------------------------


def explain(plan: Plan, name: str, partitioned: PartitionedGraph | None = None) -> str:
    """Where variable `name` lies and why, who reads it, and which reshards that takes.

    Raises:
        PlanError: the plan has no such variable; names the nearest.
    """
    if name not in plan.variables:
        near = difflib.get_close_matches(name, plan.variables, n=3, cutoff=0.3)
        hint = f" The nearest names: {', '.join(map(repr, near))}." if near else ""
        raise PlanError(f"The plan has no variable {name!r}.{hint}")
    variable = plan.variables[name]
    spec = _specs(plan, partitioned)[name]
    size = format_bytes(_num_bytes(variable))
    head = f"Variable {name!r}, {variable.dtype} {variable.shape}, {size}"
    if spec is None:
        return f"{head}\n  Left to propagation: run a step, or pass what was partitioned."
    lines = [
        head,
        f"  Placement: {placement_text(spec, plan.mesh)} ({format_spec(spec)} on {plan.mesh})",
        f"  Per device: {local_shape(variable.shape, spec, plan.mesh)}, "
        f"{format_bytes(_local_bytes(variable, spec, plan.mesh))}",
    ]
    found = None
    if partitioned is not None:
        found = next((v for v in partitioned.graph.variables if v.name == name), None)
    if partitioned is None or found is None:
        return "\n".join([*lines, f"  Why: {variable.why or 'fixed by the plan'}"])
    readers = list(_readers(partitioned, found.handle))
    lines.append(f"  Why: {_why(variable, found, partitioned, readers)}")
    lines.append("  Used by:" if readers else "  Used by no op.")
    for op in readers[:_MAX_LINES]:
        choice = partitioned.decisions[op].choice
        sides = (" ".join(map(_short, s)) or "nothing" for s in (choice.in_specs, choice.out_specs))
        lines.append(f"    {op.type} {op.name!r}: {' -> '.join(sides)}")
    lines += _more(readers)
    touching = _touching(partitioned, found.handle, readers)
    lines.append("  Reshards around them:" if touching else "  No reshard around them.")
    lines += [f"    {_reshard_text(r, partitioned.mesh)}" for r in touching[:_MAX_LINES]]
    return "\n".join([*lines, *_more(touching)])


def _more(listed: Sequence) -> list[str]:
    return [f"    and {len(listed) - _MAX_LINES} more"] if len(listed) > _MAX_LINES else []


def _short(spec: Spec) -> str:
    return f"[{format_spec(spec)}]"


def _why(
    planned: PlannedVariable, variable: Variable, partitioned: PartitionedGraph, readers: list[Op]
) -> str:
    if planned.spec is not None:
        return planned.why or "fixed by the plan"
    if variable.trainable:
        if not readers:
            return "no op reads it, so it is replicated"
        return f"no constraint; it is laid as its first reader wants it, {readers[0].name!r}"
    link = followed_weights(partitioned.graph, partitioned.prepared.rules).get(variable)
    if link is not None:
        return f"no constraint; it is updated along with {link[0].name!r} and lies like it"
    return "no constraint, and it belongs to no weight: replicated"


def _readers(partitioned: PartitionedGraph, handle: Tensor) -> Iterator[Op]:
    """The ops that use the variable's value or assign it, past those that only relabel it."""
    consumers = partitioned.prepared.consumers
    stack, seen = [handle], set()
    found = []
    while stack:
        for op in consumers.get(stack.pop(), ()):
            if op in seen:
                continue
            seen.add(op)
            if op.type in _RELABELS:
                stack += op.outputs
            else:
                found.append(op)
    order = {op: i for i, op in enumerate(partitioned.graph.ops)}
    yield from sorted(found, key=order.__getitem__)


def _touching(
    partitioned: PartitionedGraph, handle: Tensor, readers: Sequence[Op]
) -> list[Reshard]:
    near = {handle, *(t for op in readers for t in (*op.inputs, *op.outputs))}
    return [r for r in partitioned.reshards if r.tensor in near]


def _reshard_text(reshard: Reshard, mesh: Mesh) -> str:
    steps = ", then ".join(
        f"{step.kind} over {' x '.join(mesh.axis_names[a] for a in step.axes)}"
        for step in reshard.steps(mesh)
    )
    return (
        f"{reshard.tensor.name}: {format_spec(reshard.source)} -> {format_spec(reshard.target)} "
        f"({steps})"
    )
