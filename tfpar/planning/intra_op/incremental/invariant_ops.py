"""Plan-invariant ops: constants, and ops computed of nothing else, which run equally in all plans.

They are propagated and priced once. The rest of the graph is shorter, and so is what it reads of
its surroundings.
"""

from __future__ import annotations

from tfpar.ir.graph import Op, Tensor
from tfpar.ir.traits import REFERENCES
from tfpar.propagation.prepared_graph import PreparedGraph
from tfpar.propagation.rule_decision import decide_by_rule
from tfpar.propagation.state import PropagationState
from tfpar.propagation.step import record, visit


def propagate_invariant_ops(state: PropagationState) -> set[Op]:
    """Propagate the ops that run in the same way in all plans, and return them.

    Args:
        state: at its begin.
    """
    prepared, anchors = state.prepared, state.anchors
    fixed: set[Op] = set()
    made: set[Tensor] = set()
    for op in prepared.graph.ops:
        if op.type == "Placeholder":
            visit(state, op)
            fixed.add(op)
        elif made.issuperset(op.inputs) and op.name not in anchors.ops and not anchors.tensors:
            if _hangs_on_inputs_alone(op, prepared) and _stays_as_made(state, op):
                fixed.add(op)
                made.update(op.outputs)
    return fixed


def _hangs_on_inputs_alone(op: Op, prepared: PreparedGraph) -> bool:
    """Whether the decision of `op` depends on nothing but its rule and the specs of its inputs."""
    if op in prepared.ordinary:
        *_, keeps = prepared.ordinary[op]
        return keeps
    return op.type == "Const" and not any(t.dtype in REFERENCES for t in op.outputs)


def _stays_as_made(state: PropagationState, op: Op) -> bool:
    """Take the step of `op` if it moves nothing and leaves no Partials, on which readers have a
    say."""
    decision = decide_by_rule(state, op)
    arriving = tuple(state.spec(t) for t in op.inputs)
    if decision.makes_partials or decision.strategy.in_specs != arriving:
        return False
    record(state, op, decision)
    return True
