"""What a plan does with one variable, as text."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tfpar.ir.graph import Op, Tensor, Variable
from tfpar.propagation.follow import followed_weights
from tfpar.report.summary import placement_text, shard_bytes, variable_bytes, variable_specs
from tfpar.report.tables import format_bytes
from tfpar.spec import Mesh, PlanError, Spec, format_spec, local_shape

if TYPE_CHECKING:
    from tfpar.plan import Plan, PlannedVariable
    from tfpar.propagation.engine import PartitionedGraph, Reshard

_MAX_LINES = 12
_RELABELS = frozenset({"ReadVariableOp", "Identity", "Cast"})


def explain(plan: Plan, name: str, partitioned: PartitionedGraph | None = None) -> str:
    """Where variable `name` lies and why, who reads it, and which reshards that takes.

    Args:
        name: a variable's path, or an end of it that no other variable's path has.

    Raises:
        PlanError: the plan has no such variable, or several; names them, or the nearest.
    """
    name = _full_name(plan, name)
    variable = plan.variables[name]
    spec = variable_specs(plan, partitioned)[name]
    size = format_bytes(variable_bytes(variable))
    head = f"Variable {name!r}, {variable.dtype} {variable.shape}, {size}"
    if spec is None:
        return f"{head}\n  Left to propagation: run a step, or pass what was partitioned."
    lines = [
        head,
        f"  Placement: {placement_text(spec, plan.mesh)} ({format_spec(spec)} on {plan.mesh})",
        f"  Per device: {local_shape(variable.shape, spec, plan.mesh)}, "
        f"{format_bytes(shard_bytes(variable, spec, plan.mesh))}",
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


def _full_name(plan: Plan, name: str) -> str:
    if name in plan.variables:
        return name
    ending = [path for path in plan.variables if path.endswith(f"/{name}")]
    if len(ending) == 1:
        return ending[0]
    near = ending or difflib.get_close_matches(name, plan.variables, n=3, cutoff=0.3)
    count = "several variables" if ending else "no variable"
    hint = f" {'They are' if ending else 'The nearest names'}: {', '.join(map(repr, near))}."
    raise PlanError(f"The plan has {count} {name!r}.{hint if near else ''}")


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
