"""Mesh axes that split the batch, inferred from the rows of it that the ops of a plan read.

A planner that decides op by op may leave the batch whole on every rank though each op that reads it
takes only the rows of its rank. Cutting rows out of what is there costs nothing, so no price tells
the two apart. To whoever reads the data they differ: with the batch split, a rank need not be given
the rows of the others (`tap.shard_data`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from tfpar.ir.collection import collection_paused
from tfpar.ir.graph import Tensor
from tfpar.ir.traits import UNCHANGED
from tfpar.planning.memory.plan_transforms import apply_plan_transforms
from tfpar.planning.problem import Problem, step_anchors
from tfpar.plans import Plan
from tfpar.propagation.engine import propagate
from tfpar.propagation.partitioned_graph import OpPlan, PartitionedGraph
from tfpar.propagation.prepared_graph import prepare
from tfpar.spec import Replicate, Shard

_HANDS_ON = (UNCHANGED | {"Cast"}) - {"IdentityN"}
"""Op types of one input whose rows they hand on, each by itself."""


def infer_batch_axes(plan: Plan, problem: Problem) -> Plan:
    """Let `plan` split the batch also over the axes along which ops take only their rows of it.

    Nothing else changes: the same collectives run. Axes that constraints gave are left as they are,
    and so is a plan without ops of its own: its batch axes are those that it was searched for.
    """
    idle = [n for n in plan.mesh.axis_names if n not in plan.batch_axes]
    open_axes = [a for a in map(plan.mesh.axis, idle) if plan.mesh.shape[a] > 1]
    if not (plan.ops and open_axes and problem.step.batched and len(problem.meshes) > 1):
        return plan
    problem = apply_plan_transforms(problem, plan)
    with collection_paused():
        prepared = prepare(problem.step.graph)
        before = propagate(prepared, plan.mesh, step_anchors(plan, problem))
        axes = [a for a in open_axes if is_taken_in_rows(before, problem.step.batched, a)]
        if not axes:
            return plan
        split = {*plan.batch_axes, *(plan.mesh.axis_names[a] for a in axes)}
        found = dataclasses.replace(
            plan,
            batch_axes=tuple(n for n in plan.mesh.axis_names if n in split),
            ops=_without_handing_on(plan, problem),
        )
        after = propagate(prepared, found.mesh, step_anchors(found, problem))
    # Readers may take their rows along different axes: then a rank needs rows of others after all.
    return found if after.collectives() == before.collectives() else plan


def is_taken_in_rows(laid: PartitionedGraph, batched: Collection[Tensor], axis: int) -> bool:
    """Whether ranks along `axis` take only their own rows of all inputs that hold the batch."""
    tensors = [t for t in laid.graph.inputs if t in batched and laid.prepared.consumers.get(t)]
    return bool(tensors) and all(_is_taken_in_rows(laid, t, axis) for t in tensors)


def _is_taken_in_rows(laid: PartitionedGraph, tensor: Tensor, axis: int) -> bool:
    if tensor in laid.graph.outputs:
        return False  # which are whole on every rank
    for op in laid.prepared.consumers.get(tensor, ()):
        specs = laid.decisions[op].strategy.in_specs
        taken = {spec[axis] for t, spec in zip(op.inputs, specs, strict=True) if t is tensor}
        handed_on = op.type in _HANDS_ON and taken == {Replicate()}
        if handed_on and laid.specs[op.outputs[0]][axis] == Replicate():
            if _is_taken_in_rows(laid, op.outputs[0], axis):
                continue
        if taken != {Shard(0)}:
            return False
    return True


def _without_handing_on(plan: Plan, problem: Problem) -> dict[str, OpPlan]:
    """Return the op plans without those of ops that hand the batch on, which run as it comes."""
    consumers = problem.step.graph.consumers()
    reached, found = list(problem.step.batched), set()
    while reached:
        for op in consumers.get(reached.pop(), ()):
            if op.type in _HANDS_ON:
                found.add(op.name)
                reached.append(op.outputs[0])
    return {name: op for name, op in plan.ops.items() if name not in found}
