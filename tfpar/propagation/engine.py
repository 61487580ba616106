"""Propagation: from a plan's anchors to the spec of every tensor.

One pass over the graph in its own order, through forward pass, backward pass and update. Each op
takes its inputs as they come and runs the way that moves the fewest bytes (`step`); what differs
from how an input came is a reshard. A pure function of the prepared graph and the anchors, with
decisions memoized by rule and specs, so that searching calls it many times a second.

Who runs a part of a graph (`planning.intra_op.incremental.incremental`), or looks at each op before
it runs (`planning.intra_op.rhino.explicit_ops`), takes the same steps on a `PropagationState`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from tfpar.ir.graph import Op, Tensor
from tfpar.propagation.decide import FREE
from tfpar.propagation.immovable import RetryWithWholeLists, check_local
from tfpar.propagation.partitioned_graph import Anchors, PartitionedGraph
from tfpar.propagation.prepared_graph import PreparedGraph
from tfpar.propagation.roots import lay_variables
from tfpar.propagation.state import PropagationState
from tfpar.propagation.step import keep, move, settle_root, visit
from tfpar.spec import Mesh, Partial, Replicate, canonical

T = TypeVar("T")

Whole = frozenset[tuple[Op, int]]
"""(op, mesh axis) of those that must not split along the axis."""


def propagate(
    prepared: PreparedGraph,
    mesh: Mesh,
    anchors: Anchors,
    *,
    confined: bool = False,
    zeros: frozenset[Tensor] = frozenset(),
) -> PartitionedGraph:
    """Specs for every tensor of the graph from the plan's anchors.

    Args:
        confined: the graph is the body of a loop, branch or call, where nothing may cross
            ranks; Partials come out as they are.
        zeros: inputs that are zero everywhere, or lists that can be had in any spec.

    Raises:
        SpecError: a constraint that cannot hold; the message names op and variable.
        ImmovableInputError: a confined graph that needs a collective along some mesh axes.
    """

    def run(whole: Whole) -> PartitionedGraph:
        state = begin(prepared, mesh, anchors, whole, confined=confined, zeros=zeros)
        run_segment(state, prepared.graph.ops)
        return finish(state)

    return with_lists_whole(run)


def with_lists_whole(run: Callable[[Whole], T], whole: Whole = frozenset()) -> T:
    """Call `run` with the ops that must not split, and return its result.

    It is called anew, from the beginning, with more of them as long as it finds lists that an op
    cannot take in the spec that they have.
    """
    while True:
        try:
            return run(whole)
        except RetryWithWholeLists as error:
            whole |= error.ops


def begin(
    prepared: PreparedGraph,
    mesh: Mesh,
    anchors: Anchors,
    whole: Whole = frozenset(),
    *,
    confined: bool = False,
    zeros: frozenset[Tensor] = frozenset(),
) -> PropagationState:
    """Return the state before the first op: variables and inputs have their specs."""
    state = PropagationState(
        prepared, mesh, anchors, propagate, confined, zeros | prepared.zeros, whole
    )
    lay_variables(state)
    for tensor, spec in zip(prepared.graph.inputs, anchors.inputs, strict=False):
        state.specs[tensor] = canonical(tensor.shape or (), spec, mesh)
    return state


def run_segment(state: PropagationState, ops: Iterable[Op]) -> None:
    """Take the steps of `ops`, in the graph's order; what still waits then comes whole."""
    repeat, planned = make_fast_path(state), state.anchors.ops
    for op in ops:
        if op.name in planned or not repeat(op):
            visit(state, op)
    for root in [r for r, ops in state.waiting.items() if ops or isinstance(r, Op)]:
        settle_root(state, root, state.replicated)


def finish(state: PropagationState) -> PartitionedGraph:
    """Return the result, once all ops have run: weights that nothing reads are whole."""
    for root in list(state.waiting):
        settle_root(state, root, state.replicated)
    lay_outputs(state)
    result = state.result
    result.specs = {t: s for t, s in state.specs.items() if s is not None}
    for variable in state.prepared.graph.variables:
        result.variable_specs[variable] = result.specs[variable.handle]
    return result


def lay_outputs(state: PropagationState) -> None:
    """Bring what the graph returns into the specs that are asked for; other Partials are summed."""
    graph, anchors = state.prepared.graph, state.anchors
    wanted = anchors.outputs or [None] * len(graph.outputs)
    for tensor, want in zip(graph.outputs, wanted, strict=True):
        if want is None:
            gathers = not state.confined
            want = tuple(
                Replicate() if gathers and isinstance(p, Partial) else p for p in state.spec(tensor)
            )
        want = canonical(tensor.shape or (), want, state.mesh)
        if state.confined:
            check_local(state, tensor, want)
        move(state, tensor, want)
        state.result.output_specs.append(want)


# --- Fast path for nearly all of a graph: ops that run as they ran before ---
#
# Most ops are *ordinary* (`PreparedGraph.ordinary`): how they run depends on their rule and the
# specs
# of their inputs. A search takes this way millions of times, so it does nothing that can be done
# once.


def make_fast_path(state: PropagationState) -> Callable[[Op], bool]:
    """Make a function that takes an op's step if it was decided before; else it answers False."""
    prepared, mesh, specs = state.prepared, state.mesh, state.specs
    if state.whole or state.confined or state.anchors.tensors:
        return lambda op: False
    ordinary, decisions = prepared.ordinary, state.result.decisions
    known = prepared.caches.decisions
    repeated = prepared.caches.repeated.setdefault(mesh, {})

    def repeat(op: Op) -> bool:
        found = ordinary.get(op)
        if found is None:
            return False
        rule, deferred, keeps = found
        arriving = tuple([specs[t] for t in op.inputs])
        decision = repeated.get((rule, arriving, deferred))
        if decision is None:
            if FREE in arriving:
                return False
            loose = (False,) * len(arriving)
            decision = known.get((rule, arriving, loose, mesh, False, (), deferred, False))
            if decision is None:
                return False
            repeated[rule, arriving, deferred] = decision
        strategy = decision.strategy
        if strategy.in_specs != arriving:
            for tensor, need in zip(op.inputs, strategy.in_specs, strict=True):
                move(state, tensor, need)
        decisions[op] = decision
        if keeps and not decision.makes_partials:
            for tensor, made in zip(op.outputs, strategy.out_specs, strict=True):
                specs[tensor] = made
        else:
            keep(state, op, decision)
        return True

    return repeat
