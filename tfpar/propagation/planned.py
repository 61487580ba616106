"""Ops that run as a plan says.

A plan may speak of the first mesh axes alone (chunks add one more): along the others an op runs as
its inputs come.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfpar.ir.graph import Op, Tensor
from tfpar.propagation.decide import FREE, CannotHold, choice_of
from tfpar.propagation.partitioned import Decision, OpPlan
from tfpar.propagation.prepared import PINNED_DTYPES, REGION_TYPES
from tfpar.propagation.reshard import lower_reshard
from tfpar.spec import Mesh, Spec, SpecError, fitted, local_shape

if TYPE_CHECKING:
    from tfpar.propagation.engine import Propagation


def run_as_planned(propagation: Propagation, op: Op, planned: OpPlan) -> bool:
    """Run `op` as `planned`; False, and nothing done, if it cannot."""
    if planned.num_axes == propagation.mesh.num_axes:
        key = (propagation.prepared.rules[op], planned, propagation.mesh)
        memo = propagation.prepared.memo
        if key not in memo:
            memo[key] = _decision(propagation, op, planned)
        decision = memo[key]
    else:
        decision = _decision(propagation, op, planned)
    if decision is None:
        return False
    for tensor, need in zip(op.inputs, decision.choice.in_specs, strict=True):
        have = propagation.specs[tensor]
        if tensor.dtype in PINNED_DTYPES and have is not FREE and have != need:
            return False
    kept = [
        _with_rest(propagation, tensor, made, spec) if len(spec) < len(made) else spec
        for tensor, made, spec in zip(
            op.outputs, decision.choice.out_specs, planned.kept, strict=True
        )
    ]
    propagation.record(op, decision, kept)
    return True


def _with_rest(propagation: Propagation, tensor: Tensor, made: Spec, spec: Spec) -> Spec:
    """`spec` along the first mesh axes; along the others `tensor`, made as `made`, lies as it would
    without a plan."""
    rest = propagation.resolved(tensor, made)[len(spec) :]
    return fitted(tensor.shape or (), (*spec, *rest), propagation.mesh)


def _decision(propagation: Propagation, op: Op, planned: OpPlan) -> Decision | None:
    """The decision that runs `op` as `planned`, or None if its rule has none."""
    count, mesh = planned.num_axes, propagation.mesh
    counts = len(planned.in_specs), len(planned.made)
    if op.type in REGION_TYPES or not count or counts != (len(op.inputs), len(op.outputs)):
        return None
    spoken_of = Mesh(mesh.axis_names[:count], mesh.shape[:count])
    rule = propagation.prepared.rules[op]
    choice = choice_of(rule, planned.in_specs, planned.made, spoken_of)
    if choice is None or not _can_keep(op, planned, spoken_of):
        return None
    if count < mesh.num_axes:
        try:
            choice = propagation.chosen(op, planned=choice)
        except CannotHold:
            return None
    decision = propagation.expanded(op, choice)
    made = tuple(spec[:count] for spec in decision.choice.out_specs)
    return decision if made == planned.made else None


def _can_keep(op: Op, planned: OpPlan, mesh: Mesh) -> bool:
    """Whether the outputs of `op` can lie as planned: their sizes may be others."""
    try:
        for tensor, made, kept in zip(op.outputs, planned.made, planned.kept, strict=True):
            shape = tuple(tensor.shape or ())
            local_shape(shape, kept, mesh)
            lower_reshard(shape, made, kept, mesh)
    except SpecError:
        return False
    return True
