"""Propagation step of one op: a plan, its bodies or its rule decide it, and the decision is
recorded.

A plan decides (`planned_op`), or what its bodies allow (`regions`), or its rule (`rule_decision`).
What draws random numbers, or only relabels what is open, waits for its first reader (`roots`).
"""

from __future__ import annotations

from collections.abc import Sequence

from tfpar.ir.graph import Op, Tensor
from tfpar.ir.traits import NEW_LISTS, REGIONS
from tfpar.propagation.decide import FREE, ImmovableInputError
from tfpar.propagation.final_spec import choose_final_spec
from tfpar.propagation.follow import followed_spec
from tfpar.propagation.immovable import check_local, make_immovable_error
from tfpar.propagation.lists import remaking
from tfpar.propagation.partitioned_graph import Decision, Reshard
from tfpar.propagation.planned_op import apply_op_plan
from tfpar.propagation.regions import partition_region
from tfpar.propagation.roots import draw_with_spec, find_root, root_spec
from tfpar.propagation.rule_decision import decide_by_rule
from tfpar.propagation.state import PropagationState, Root
from tfpar.spec import Spec


def visit(state: PropagationState, op: Op) -> None:
    """Take the step of `op`.

    Raises:
        SpecError, ImmovableInputError, RetryWithWholeLists: it cannot run; see
            `immovable.make_immovable_error`.
    """
    planned = state.anchors.ops.get(op.name)
    if planned is not None:
        run = apply_op_plan(state, op, planned)
        if run is not None:
            record(state, op, *run)
            return
    if op.type == "Placeholder":
        for tensor in op.outputs:
            state.specs.setdefault(tensor, state.replicated)
        return
    root = find_root(state, op)
    if root is None:
        _visit_settled(state, op)
        return
    if root is op:
        state.waiting[op] = []
    else:
        state.waiting[root].append(op)
    state.root_of[op.outputs[0]] = root
    state.specs[op.outputs[0]] = FREE


def _visit_settled(state: PropagationState, op: Op) -> None:
    """Decide and record `op`, which opens nothing and waits for nothing."""
    try:
        if op.type in REGIONS:
            for tensor in op.inputs:
                if state.is_open(tensor):
                    _settle(state, tensor, state.replicated)
            decision, replicated = partition_region(state, op)
            state.result.replicated_regions += [(op, axis) for axis in replicated]
        else:
            decision = decide_by_rule(state, op)
        if state.confined:
            for tensor, need in zip(op.inputs, decision.strategy.in_specs, strict=True):
                check_local(state, tensor, need)
    except ImmovableInputError as error:
        raise make_immovable_error(state, op, error) from None
    record(state, op, decision)


def record(
    state: PropagationState, op: Op, decision: Decision, planned: Sequence[Spec] | None = None
) -> None:
    """Settle how `op` runs; its outputs are kept as `planned`, if a plan says so."""
    result = state.result
    for tensor, need in zip(op.inputs, decision.strategy.in_specs, strict=True):
        if state.specs[tensor] is FREE:
            _settle(state, tensor, need)
        move(state, tensor, need)
    result.decisions[op] = decision
    if op in state.prepared.once and not state.confined and state.mesh.size > 1:
        result.shared.add(op)
    keep(state, op, decision, planned)


def keep(
    state: PropagationState, op: Op, decision: Decision, planned: Sequence[Spec] | None = None
) -> None:
    """Settle the specs of the outputs of `op`; `planned` as of `record`."""
    result = state.result
    for i, (tensor, made) in enumerate(zip(op.outputs, decision.strategy.out_specs, strict=True)):
        kept = choose_final_spec(state, tensor, made) if planned is None else planned[i]
        if kept != made:
            resolution = Reshard(tensor, made, kept)
            result.resolutions[tensor] = resolution
            result.reshards.append(resolution)
        state.specs[tensor] = kept


def move(state: PropagationState, tensor: Tensor, need: Spec) -> None:
    """See that `tensor`, which is not open, can be read as `need`."""
    have = state.specs[tensor]
    if have == need or (tensor, need) in state.moved:
        return
    assert have is not None
    state.moved.add((tensor, need))
    if tensor.dtype != "variant":
        state.result.reshards.append(Reshard(tensor, have, need))
        return
    op = tensor.op
    if op.type not in (*NEW_LISTS, "Placeholder"):  # made anew, of what it was made of
        strategy = remaking(op, state.prepared.rules[op], need, state.mesh)
        for source, spec in zip(op.inputs, strategy.in_specs, strict=True):
            move(state, source, spec)


def _settle(state: PropagationState, tensor: Tensor, need: Spec) -> None:
    """Make the open `tensor` come out as `need` where its root can have the spec for it."""
    settle_root(state, *root_spec(state, tensor, need))


def settle_root(state: PropagationState, root: Root, spec: Spec) -> None:
    """Give an open weight or draw the spec `spec`, and run everything that only relabelled it."""
    waiting = state.waiting.pop(root)
    if isinstance(root, Op):
        record(state, root, draw_with_spec(state, root, spec))
    else:
        state.specs[root.handle] = spec
        for slot, mapping in state.followers.get(root, ()):
            state.specs[slot.handle] = followed_spec(spec, mapping)
    for op in waiting:
        _visit_settled(state, op)
