"""Plan of a folded graph, as a search finds it, and its unfolding to a plan of the whole model."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence

from tfpar.cost.cost import Cost
from tfpar.planning.folding.folded_model import FoldedModel
from tfpar.planning.meshes import LogicalMesh
from tfpar.planning.problem import Problem
from tfpar.plans import Candidate, Findings, Plan, PlannedVariable, SpecOption
from tfpar.propagation.partitioned_graph import Anchors
from tfpar.spec import Mesh, Shard, Spec


@dataclasses.dataclass(frozen=True, eq=False)
class FoldedPlan:
    """A plan of the folded graph.

    Attributes:
        batch_axes: names of the mesh axes that split the batch.
        anchors: what it fixes. Variables that these do not name are left to propagation, and ops
            are those that would not run so by themselves.
        cost: of a step.
        num_split: how many weights are split, those that are given left out.
    """

    mesh: Mesh
    batch_axes: tuple[str, ...]
    anchors: Anchors
    cost: Cost
    num_split: int


def count_split(specs: Mapping[str, Spec], given: Collection[str]) -> int:
    """Count the variables that are split, without those named in `given`."""
    return sum(
        any(isinstance(p, Shard) for p in spec) for name, spec in specs.items() if name not in given
    )


def unfold_plan(
    problem: Problem,
    model: FoldedModel,
    found: FoldedPlan,
    planner: str,
    alternatives: Mapping[str, Sequence[SpecOption]] | None = None,
    elsewhere: Sequence[Candidate] = (),
    preferred_to: FoldedPlan | None = None,
    cut_short: bool = False,
    bound_s: float | None = None,
) -> Plan:
    """Return the plan of the whole model: what is found for a block serves all its instances.

    Args:
        planner: its name.
        alternatives: what else was priced for a variable of the folded graph, by its name.
        elsewhere: the best plans on other meshes.
        preferred_to: the fastest plan, if `found` was taken for being simpler.
        cut_short: there may be better plans: there was no time to look for them.
        bound_s: seconds that no plan of all meshes takes less than; None if that is not known.
    """
    twins = {v.name: [t.name for t in ts] for v, ts in model.folded.twins.items()}
    why = f"chosen by the {planner} planner"
    laid: dict[str, tuple[Spec | None, str]] = {
        twin: (spec, why)
        for name, spec in found.anchors.variables.items()
        for twin in twins.get(name, ())
    }
    laid |= {name: (given.spec, given.why) for name, given in problem.given.variables.items()}
    priced = {
        twin: tuple(options)
        for name, options in (alternatives or {}).items()
        for twin in twins[name]
    }
    passed_over = None
    if preferred_to is not None and preferred_to is not found:
        passed_over = preferred_to.cost.seconds, preferred_to.cost.collectives
    return problem.plan(
        mesh=found.mesh,
        batch_axes=found.batch_axes,
        variables={
            v.name: PlannedVariable(
                tuple(v.shape),
                v.dtype,
                v.trainable,
                *laid.get(v.name, (None, "")),
                priced.get(v.name, ()),
            )
            for v in problem.step.variables
        },
        planner=planner,
        ops={
            name: op
            for stand_in, op in found.anchors.ops.items()
            for name in model.folded.stands_for.get(stand_in, (stand_in,))
        },
        findings=Findings(
            cost=found.cost,
            layouts=tuple(sorted(elsewhere, key=lambda other: (other.seconds, other.name))),
            passed_over=passed_over,
            cut_short=cut_short,
            bound_s=bound_s,
        ),
    )


def offer_folded_plan(
    problem: Problem, model: FoldedModel, planner: str, found: FoldedPlan
) -> None:
    """Offer what a planner has found to whoever waits for better plans; it is unfolded when it is
    asked for."""
    assert problem.aim.offer is not None, "somebody waits"
    problem.aim.offer(functools.partial(unfold_plan, problem, model, found, planner), found.cost)


def folded_anchors(plan: Plan, problem: Problem, model: FoldedModel) -> Anchors:
    """Return the anchors on the folded graph of a plan of the whole model, the inverse of
    `unfold_plan`."""
    specs = {v.name: plan.variables[v.name].spec for v in model.folded.graph.variables}
    laid = {name: spec for name, spec in specs.items() if spec is not None}
    logical = LogicalMesh(plan.mesh, tuple(map(plan.mesh.axis, plan.batch_axes)), ())
    ops = {}
    for op in model.folded.graph.ops:
        first, *_ = model.folded.stands_for.get(op.name, (op.name,))
        if first in plan.ops:
            ops[op.name] = plan.ops[first]
    return dataclasses.replace(model.anchors(problem, logical, laid), ops=ops)
