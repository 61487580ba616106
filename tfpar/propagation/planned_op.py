"""Ops that run as a plan says.

A plan may speak of the first mesh axes alone (chunks add one more): along the others an op runs as
its inputs come.
"""

from __future__ import annotations

from tfpar.ir.graph import Op, Tensor
from tfpar.ir.traits import REFERENCES, REGIONS
from tfpar.propagation.decide import FREE, ImmovableInputError, strategy_of
from tfpar.propagation.final_spec import resolved_spec
from tfpar.propagation.partitioned_graph import Decision, OpPlan
from tfpar.propagation.reshard import lower_reshard
from tfpar.propagation.rule_decision import strategy_by_rule, with_decomposition
from tfpar.propagation.state import PropagationState
from tfpar.spec import Mesh, Spec, SpecError, drop_uneven_shards, local_shape


def apply_op_plan(
    state: PropagationState, op: Op, planned: OpPlan
) -> tuple[Decision, list[Spec]] | None:
    """Decide `op` as `planned`, and return the specs to keep its outputs in, too; None if it cannot
    run so."""
    planned = planned.along(state.mesh)
    if planned.num_axes == state.mesh.num_axes:
        key = (state.prepared.rules[op], planned, state.mesh)
        known = state.prepared.caches.planned
        if key not in known:
            known[key] = _decision(state, op, planned)
        decision = known[key]
    else:
        decision = _decision(state, op, planned)
    if decision is None:
        return None
    for tensor, need in zip(op.inputs, decision.strategy.in_specs, strict=True):
        have = state.specs[tensor]
        if tensor.dtype in REFERENCES and have is not FREE and have != need:
            return None
    return decision, [
        _with_rest(state, tensor, made, spec) if len(spec) < len(made) else spec
        for tensor, made, spec in zip(
            op.outputs, decision.strategy.out_specs, planned.kept, strict=True
        )
    ]


def _with_rest(state: PropagationState, tensor: Tensor, made: Spec, spec: Spec) -> Spec:
    """`spec` along the first mesh axes; along the others `tensor`, made as `made`, is placed as it
    would be without a plan."""
    rest = resolved_spec(state, tensor, made)[len(spec) :]
    return drop_uneven_shards(tensor.shape or (), (*spec, *rest), state.mesh)


def _decision(state: PropagationState, op: Op, planned: OpPlan) -> Decision | None:
    """Return the decision that runs `op` as `planned`, or None if its rule has none."""
    count, mesh = planned.num_axes, state.mesh
    counts = len(planned.in_specs), len(planned.made)
    if op.type in REGIONS or not count or counts != (len(op.inputs), len(op.outputs)):
        return None
    spoken_of = Mesh(mesh.axis_names[:count], mesh.shape[:count])
    rule = state.prepared.rules[op]
    strategy = strategy_of(rule, planned.in_specs, planned.made, spoken_of)
    if strategy is None or not _can_keep(op, planned, spoken_of):
        return None
    if count < mesh.num_axes:
        try:
            strategy = strategy_by_rule(state, op, planned=strategy)
        except ImmovableInputError:
            return None
    decision = with_decomposition(state, op, strategy)
    made = tuple(spec[:count] for spec in decision.strategy.out_specs)
    return decision if made == planned.made else None


def _can_keep(op: Op, planned: OpPlan, mesh: Mesh) -> bool:
    """Whether the outputs of `op` can have the planned specs: their sizes may be others."""
    try:
        for tensor, made, kept in zip(op.outputs, planned.made, planned.kept, strict=True):
            shape = tuple(tensor.shape or ())
            local_shape(shape, kept, mesh)
            lower_reshard(shape, made, kept, mesh)
    except SpecError:
        return False
    return True
