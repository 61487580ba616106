"""Plans from constraints alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tfpar.constraints import (
    Constraint,
    batch_axes,
    resolve_fsdp,
    resolve_outputs,
    resolve_variables,
)
from tfpar.ir.fingerprint import fingerprint
from tfpar.ir.graph import Gradient, Graph
from tfpar.ir.planning_graph import planning_graph
from tfpar.plans.plan import Plan
from tfpar.plans.variables import PlannedVariable
from tfpar.spec import Mesh


def plan_from_constraints(
    graph: Graph,
    mesh: Mesh,
    constraints: Sequence[Constraint] = (),
    *,
    gradients: Sequence[Gradient] = (),
    part: bool = False,
) -> Plan:
    """Return the plan that `constraints` make for `graph`; without any, data parallelism.

    Args:
        gradients: of the step, if known; see `Plan.fitted`.
        part: `graph` is only part of what the constraints speak of (an evaluation has no
            optimizer): they may match nothing in it.

    Raises:
        SpecError: a constraint that matches nothing or cannot hold, or two that contradict.
    """
    shapes = [(v.name, v.shape) for v in graph.variables]
    places = {v.name: v.place for v in graph.variables if v.place}
    resolved = resolve_variables(constraints, shapes, mesh, must_match=not part, places=places)
    outputs = resolve_outputs(constraints, graph, mesh, must_match=not part)
    sharded = resolve_fsdp(constraints, graph.variables, mesh, resolved, must_match=not part)
    variables = {}
    for variable in graph.variables:
        planned = PlannedVariable(tuple(variable.shape), variable.dtype, variable.trainable)
        if variable.name in resolved:
            found = resolved[variable.name]
            planned = dataclasses.replace(planned, spec=found.spec, why=found.reason)
        if variable.name in sharded:
            planned = dataclasses.replace(planned, **vars(sharded[variable.name]))
        variables[variable.name] = planned
    return Plan(
        mesh=mesh,
        batch_axes=batch_axes(constraints, mesh),
        variables=variables,
        tensors={n: r.spec for n, r in outputs.items()},
        constraints=tuple(map(str, constraints)),
        fingerprint=fingerprint(planning_graph(graph, gradients).graph),
    )
