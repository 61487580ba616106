"""Decision of how one op runs by its rule, given the specs of its inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from tfpar.ir.graph import Op, Variable
from tfpar.propagation.consumer_spec import nearest, preferred_shard
from tfpar.propagation.decide import FREE, OperandState, OpStrategy, choose_strategy, input_specs
from tfpar.propagation.factors import CARRY, REPLICATE, Split, shard_of, size_after, spec_of
from tfpar.propagation.memo_trie import memoize_strategy
from tfpar.propagation.partitioned_graph import Anchors, Decision
from tfpar.propagation.prepared_graph import PreparedGraph, prepare
from tfpar.propagation.state import PropagationState, Within
from tfpar.propagation.view import View
from tfpar.rules.rule import PLAIN, OpRule
from tfpar.spec import Mesh, Partial, Replicate, Shard


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


# --- Dims that an op makes of nothing: the rows of a Fill, the classes of a one-hot ---
#
#     %zeros: float32[1000,8] = Fill([1000, 8], 0)      // no input has these dims
#     %new = AddV2(%zeros, %slot)                       // the plan has %slot as S(0)
#
# No input is split there, so nothing asks for a split but the readers. Where all of them want a
# shard, as here, each rank makes only its own part.


def split_generated(view: View, op: Op, decision: Decision, whole: Collection[int]) -> Decision:
    """Split the dims that `op` makes of nothing, in `decision`, as its readers want them.

    Args:
        whole: the mesh axes along which `op` must not split.
    """
    rule = view.prepared.rules[op]
    if decision.expansion is not None or len(op.outputs) != 1:
        return decision
    (tensor,), (dims,) = op.outputs, rule.outputs
    splits, (made,) = list(decision.strategy.splits), decision.strategy.out_specs
    for axis, parts in enumerate(view.mesh.shape):
        if splits[axis][0] != REPLICATE or parts == 1 or axis in whole:
            continue
        wanted = preferred_shard(
            view, tensor, axis, (), even=False
        )  # dims that are split already count too
        if not isinstance(wanted, Shard) or (wanted.stride, wanted.unit) != PLAIN:
            continue
        dim = dims[wanted.dim]
        if len(dim) == 1 and rule.can_split(dim[0]) and _is_generated(rule, dim[0]):
            splits[axis] = (dim[0], PLAIN)
            made = (*made[:axis], wanted, *made[axis + 1 :])
    if made == decision.strategy.out_specs[0]:
        return decision
    strategy = dataclasses.replace(decision.strategy, splits=tuple(splits), out_specs=(made,))
    return dataclasses.replace(decision, strategy=strategy)


def _is_generated(rule: OpRule, factor: int) -> bool:
    return not any(rule.has_factor(dims, factor) for dims in rule.inputs)


# --- Weights that the plan leaves open and whose first reader has no preference of its own ---
#
#     %rows: float32[6,8] = GatherV2(%table, %ids, 0)     // %table is open, %ids: R
#     %y:    float32[6,4] = MatMul(%rows, %w)             // the plan has %w as S(0)
#
# Nothing that is read with the table is split, so the lookup has no reason to split anything. But
# the product wants its rows split along their second dim, as `w` is. So the table gets S(1): a rank
# stores half of it, looks up half of each row, and nothing has to be cut later. The scale of a
# normalisation before a split matrix is another such weight.


def split_opened(
    view: View, op: Op, decision: Decision, opened: Sequence[int], whole: Collection[int]
) -> Decision:
    """Split the dims of `op`'s open weights, in `decision`, as what comes next wants them.

    Args:
        opened: the inputs of `op` that are open weights.
        whole: the mesh axes along which `op` must not split.
    """
    rule, mesh = view.prepared.rules[op], view.mesh
    splits: list[Split] = list(decision.strategy.splits)
    if not opened or len(op.outputs) != 1 or CARRY in dict(splits):
        return decision
    (tensor,), (dims,) = op.outputs, rule.outputs
    if view.anchor_of(tensor) is not None or decision.expansion is not None:
        return decision
    sizes = list(rule.sizes)
    for axis, parts in enumerate(mesh.shape):
        if splits[axis][0] == REPLICATE and parts > 1 and axis not in whole:
            wanted = _wanted(view, op, axis)
            dim = () if wanted is None else dims[wanted.dim]
            if len(dim) == 1 and rule.can_split(dim[0]) and dim[0] not in rule.expand:
                split = (dim[0], PLAIN)
                lays = any(shard_of(rule.inputs[i], split, sizes, parts) for i in opened)
                if lays and sizes[dim[0]] % parts == 0:
                    splits[axis] = split
        factor, pattern = splits[axis]
        if factor >= 0:
            sizes[factor] = size_after(sizes[factor], pattern, parts)
    chosen = tuple(splits)
    if chosen == decision.strategy.splits:
        return decision
    none: list[tuple[int, ...]] = [()] * len(chosen)
    strategy = dataclasses.replace(
        decision.strategy,
        splits=chosen,
        in_specs=input_specs(rule, chosen, mesh, none, [""] * len(chosen)),
        out_specs=(spec_of(dims, rule, chosen, mesh.shape, is_output=True),),
    )
    return dataclasses.replace(decision, strategy=strategy)


def _wanted(view: View, op: Op, axis: int) -> Shard | None:
    """Return the shard that consumers of `op` prefer, if all its inputs are whole along `axis`;
    else None."""
    specs = (view.specs[t] for t in op.inputs)
    if any(spec is not FREE and not isinstance(spec[axis], Replicate) for spec in specs):
        return None
    return nearest(view, op.outputs[0], axis)


# --- decompositions -------------------------------------------------------------------------
# Softmax cross entropy over split classes, batch normalisation over a split batch: the op itself
# could not run so (`OpRule.expand`).


def expand_decision(
    op: Op,
    strategy: OpStrategy,
    prepared: PreparedGraph,
    mesh: Mesh,
    within: Within,
    confined: bool = False,
) -> Decision:
    """Return `strategy` as a decision: of the op's decomposition if it splits what asks for that.

    Args:
        prepared: the graph of `op`.
        within: propagates the decomposition; see `state.Within`.
        confined: nothing may cross ranks in it.
    """
    rule = prepared.rules[op]
    factor, parts = _decomposed(rule, strategy, mesh)
    if factor is None and rule.stands_for is None:
        return Decision(strategy)
    key = (rule, strategy, mesh, confined)
    known = prepared.caches.expansions
    if key not in known:
        partial = [
            spec if any(isinstance(p, Partial) for p in spec) else None
            for spec in strategy.out_specs
        ]
        # What the op would leave Partial its decomposition leaves so too: who reads it says where
        # it is reduced.
        graph = _decomposition(op, prepared, factor, parts, any(partial))
        anchors = Anchors(inputs=strategy.in_specs, outputs=partial)
        inner = within(graph, mesh, anchors, confined=confined)
        made = dataclasses.replace(strategy, out_specs=tuple(inner.output_specs))
        known[key] = Decision(made, expansion=inner)
    return known[key]


def _decomposed(rule: OpRule, strategy: OpStrategy, mesh: Mesh) -> tuple[int | None, int]:
    """The factor that the op is decomposed for, and into how many parts that is split; None if it
    runs as it is."""
    for factor in rule.expand:
        axes = tuple(a for a, s in enumerate(strategy.splits) if s[0] == factor)
        parts = mesh.group_size(axes)
        if parts > 1:
            return factor, parts
    return None, 1


def _decomposition(
    op: Op, prepared: PreparedGraph, factor: int | None, parts: int, leaves_partial: bool
) -> PreparedGraph:
    rule = prepared.rules[op]
    key = (rule, factor, parts, leaves_partial)
    known = prepared.caches.decompositions
    if key not in known:
        build = rule.stands_for if factor is None else rule.expand[factor]
        assert build is not None
        known[key] = prepare(build(op, parts), reduces=not leaves_partial)
    return known[key]
