"""Resolution of constraints on stages: the stage of a pipeline that forward ops are put into."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from tfpar.constraints.activations import scopes_of
from tfpar.constraints.constraint_types import Constraint, PutInStage
from tfpar.constraints.patterns import compile_pattern, matches_nothing, without_call_counts
from tfpar.ir.graph import Graph, Op
from tfpar.spec import SpecError


def resolve_stages(
    constraints: Sequence[Constraint],
    graph: Graph,
    ops: Sequence[Op],
    num_stages: int,
    *,
    must_match: bool = True,
) -> dict[Op, int]:
    """Resolve the stage of each of `ops` that some `stage` names.

    Args:
        ops: forward ops of `graph`, those that are to be given stages.
        must_match: False lets constraints match nothing: for a step that is part of another.

    Raises:
        SpecError: a constraint that matches nothing, a stage that there is not, or two for one op.
    """
    wanted = [c for c in constraints if isinstance(c, PutInStage)]
    check_stages(wanted, num_stages)
    if not wanted:
        return {}
    known = _names_of_scopes(graph, ops)
    found: dict[Op, PutInStage] = {}
    for constraint in wanted:
        matching = _matching(constraint.pattern, ops, known)
        if not matching and must_match:
            names = sorted({name for names in known.values() for name in names})
            raise SpecError(matches_nothing(constraint, constraint.pattern, names, "layer or op"))
        for op in matching:
            before = found.setdefault(op, constraint)
            if before.index != constraint.index:
                raise SpecError(
                    f"Op {op.name!r}: {before} and {constraint} contradict each other. Narrow one "
                    f"of the patterns."
                )
    return {op: constraint.index for op, constraint in found.items()}


def least_stages(constraints: Sequence[Constraint]) -> int:
    """Return the least number of stages that constraints ask for; 1 if they speak of none."""
    return max((c.index + 1 for c in constraints if isinstance(c, PutInStage)), default=1)


def check_stages(constraints: Sequence[Constraint], num_stages: int) -> None:
    """Raise SpecError for a constraint that names a stage which there is not."""
    for constraint in constraints:
        if not isinstance(constraint, PutInStage):
            continue
        if num_stages == 1:
            raise SpecError(
                f"{constraint}: there is no pipeline of several stages. Ask for one, as in "
                f"pipeline=tap.Pipeline(stages=2, microbatches=4), or leave the constraint out."
            )
        if constraint.index >= num_stages:
            raise SpecError(
                f"{constraint}: there are {num_stages} stages, numbered from 0 to {num_stages - 1}."
            )


def _matching(pattern: str, ops: Sequence[Op], known: Mapping[str, Sequence[str]]) -> list[Op]:
    """The ops inside of layers that match; where there are none, of scopes as they are written;
    where there are none of these, the ops that match."""
    compiled = compile_pattern(pattern)
    scopes = {s for s, names in known.items() if any(map(compiled.fullmatch, names))}
    scopes = scopes or {s for s in known if compiled.fullmatch(s)}
    if scopes:
        return [op for op in ops if not scopes.isdisjoint(scopes_of(op))]
    return [
        op
        for op in ops
        if compiled.fullmatch(op.name) or compiled.fullmatch(without_call_counts(op.name))
    ]


def _names_of_scopes(graph: Graph, ops: Sequence[Op]) -> dict[str, tuple[str, ...]]:
    """Return the possible names of each scope around these ops.

    The scope of a layer with weights is known by the places of these: whether `dense_1` is the
    layer `dense_1` or a call of `dense`. Where such scopes all bear the number of their call, so do
    others.
    """
    layers = _layers(graph)
    counted = bool(layers) and all(_counted(scope, layer) for scope, layer in layers.items())
    found: dict[str, tuple[str, ...]] = {}
    for op in ops:
        for scope in scopes_of(op):
            if scope in layers:
                found[scope] = (layers[scope],)
            elif counted and _counted(scope, without_call_counts(scope)):
                found[scope] = (without_call_counts(scope),)
            else:
                found[scope] = tuple(dict.fromkeys((scope, without_call_counts(scope))))
    return found


def _counted(scope: str, layer: str) -> bool:
    return scope.rpartition("/")[2] != layer.rpartition("/")[2]


def _layers(graph: Graph) -> dict[str, str]:
    """By scope, the path of the layer whose weights, or those of layers inside, are read there.

    Not every part of a path opens a scope (a list of layers does not), nor does every scope belong
    to a part.
    """
    consumers = graph.consumers()
    found = {}
    for variable in graph.variables:
        path = (variable.place or variable.name).split("/")[:-1]
        for op in consumers.get(variable.handle, ()):
            first = 0
            for scope in scopes_of(op):
                part = scope.rpartition("/")[2]
                at = next((i for i in range(first, len(path)) if _is_call(part, path[i])), None)
                if at is not None:
                    found[scope] = "/".join(path[: at + 1])
                    first = at + 1
    return found


def _is_call(part: str, name: str) -> bool:
    """Whether a scope's last part is that of a call of the layer `name`."""
    return part == name or re.fullmatch(rf"{re.escape(name)}_\d+", part) is not None
