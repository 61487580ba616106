"""Decision of how one op runs by its rule, given the specs of its inputs."""

from __future__ import annotations

from tfpar.ir.graph import Op, Variable
from tfpar.propagation.decide import FREE, OperandState, OpStrategy, choose_strategy
from tfpar.propagation.expansions import expand_decision
from tfpar.propagation.generated_dims import split_generated
from tfpar.propagation.memo_trie import memoize_strategy
from tfpar.propagation.open_weights import split_opened
from tfpar.propagation.partitioned_graph import Decision
from tfpar.propagation.state import PropagationState


def decide_by_rule(state: PropagationState, op: Op) -> Decision:
    """Decide how `op` runs: the cheapest way; dims that it makes of nothing are split as readers
    prefer.

    Raises:
        ImmovableInputError: its inputs that cannot move exclude every way.
    """
    prepared = state.prepared
    rule = prepared.rules[op]
    specs = tuple(state.specs[t] for t in op.inputs)
    loose = tuple(map(state.is_loose, op.inputs))
    whole = state.whole_axes(op)
    read = (op in prepared.deferred, op in prepared.sparse)
    key = (rule, specs, loose, state.mesh, state.confined, whole, *read)
    decision = prepared.caches.decisions.get(key)
    if decision is None:
        decision = with_decomposition(state, op, strategy_by_rule(state, op))
        prepared.caches.decisions[key] = decision
    if state.confined:
        return decision
    if rule.generates:
        found = decision
        decision = memoize_strategy(
            state,
            (split_generated, op, found, whole),
            lambda view: split_generated(view, op, found, whole),
        )
    if FREE in specs:
        opened = [
            i
            for i, t in enumerate(op.inputs)
            if state.is_open(t) and isinstance(state.root_of.get(t), Variable)
        ]
        decision = memoize_strategy(
            state,
            (split_opened, op, decision, tuple(opened), whole),
            lambda view: split_opened(view, op, decision, opened, whole),
        )
    return decision


def strategy_by_rule(
    state: PropagationState, op: Op, planned: OpStrategy | None = None
) -> OpStrategy:
    """Return the cheapest way to run `op`; see `decide.choose_strategy`.

    Args:
        planned: how it runs along the first mesh axes, if that is given.
    """
    rule = state.prepared.rules[op]
    return choose_strategy(
        rule,
        [OperandState.of(t, state.is_loose(t), state.confined) for t in op.inputs],
        tuple(state.specs[t] for t in op.inputs),
        sum(t.num_bytes for t in op.outputs),
        state.mesh,
        state.whole_axes(op),
        planned=planned,
        sparse=op in state.prepared.sparse,
        deferred=op in state.prepared.deferred,
    )


def with_decomposition(state: PropagationState, op: Op, strategy: OpStrategy) -> Decision:
    """Return `strategy` as a decision; see `expansions.expand_decision`."""
    return expand_decision(op, strategy, state.prepared, state.mesh, state.within, state.confined)
