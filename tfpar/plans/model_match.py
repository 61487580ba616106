"""Match of a plan to the step at hand: the same model by other names is accepted, another one is
refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tfpar.ir.fingerprint import fingerprint
from tfpar.ir.graph import Gradient, Graph
from tfpar.ir.names import pair
from tfpar.ir.planning_graph import planning_graph
from tfpar.ir.roles import Roles, trains
from tfpar.pipeline.step_stages import assignable
from tfpar.plans.difference import abbreviate_list
from tfpar.plans.stages import renamed_keys
from tfpar.spec import Mesh, OtherModelError, PlanError

if TYPE_CHECKING:
    from tfpar.plans.plan import Plan


def match_to_graph(
    plan: Plan, graph: Graph, mesh: Mesh | None, gradients: Sequence[Gradient], part: bool
) -> Plan:
    """Return the plan of `Plan.fitted`; arguments and errors as there."""
    if mesh is not None and mesh != plan.mesh:
        raise PlanError(
            f"The plan is for the mesh {plan.mesh}, not for {mesh}. Use that mesh, or make "
            f"a plan for this one."
        )
    found = {v.name: v for v in graph.variables}
    now = pair(plan.variables, {v.name: v.place for v in graph.variables})
    missing = sorted(set(plan.variables) - set(now))
    extra = sorted(set(found) - set(now.values()))
    # Names of other state (seeds, metrics) may be counted up in one process.
    told = [n for n in missing if plan.variables[n].trainable or plan.variables[n].spec]
    differences = [
        *_difference("missing", [] if part else told),
        *_difference("unknown to the plan", [n for n in extra if found[n].trainable]),
        *_difference(
            "of another shape",
            [
                f"{n!r} is {tuple(found[n].shape)}, planned as {plan.variables[planned].shape}"
                for planned, n in now.items()
                if tuple(found[n].shape) != plan.variables[planned].shape
            ],
            quote=False,
        ),
    ]
    if differences:
        difference = "; ".join(differences)
        raise OtherModelError(
            f"The plan is for another model: {difference}. Build and compile the model as when "
            f"the plan was saved, or make a new plan.",
            difference,
        )
    fitting = _renamed(plan, now)
    if part:
        return fitting
    searched = planning_graph(graph, gradients).graph
    if fingerprint(searched, {n: planned for planned, n in now.items()}) != plan.fingerprint:
        state = _difference("missing", missing)
        raise OtherModelError(
            f"The plan is for another step: the weights are the same, but not the ops (the "
            f"graph's fingerprint differs{''.join(f'; {d}' for d in state)}). Was the loss, a "
            f"metric, an activation or the type of inputs or labels changed, or TensorFlow or "
            f"Keras updated? Make a new plan.",
            "other ops",
        )
    stages = fitting.stages
    if stages is not None:
        roles = Roles.of(searched, [t for g in gradients for t in g.tensors])
        if stages.scopes or trains(searched, roles):
            stages = stages.fitted(assignable(searched, roles))
    if fitting is plan and stages == plan.stages:
        return plan
    return dataclasses.replace(fitting, fingerprint=fingerprint(searched), stages=stages)


def _renamed(plan: Plan, now: Mapping[str, str]) -> Plan:
    """The plan with new names for variables, given by their old ones."""
    if all(name == before for before, name in now.items()):
        return plan
    variables = renamed_keys(plan.variables, now)
    stages = None if plan.stages is None else plan.stages.renamed(now)
    offloaded = plan.offloaded.renamed(now)
    return dataclasses.replace(plan, variables=variables, stages=stages, offloaded=offloaded)


def _difference(what: str, items: Sequence[str], quote: bool = True) -> list[str]:
    return [f"variables {what}: {abbreviate_list(items, quote=quote)}"] if items else []
