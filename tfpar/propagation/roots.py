"""Roots, the tensors whose spec is open at first: weights that the plan leaves open, and random
draws; and the specs of all other variables.

The plan says nothing of this table:

    %t:    resource[100,8] = Placeholder          // open: a *root*
    %read = ReadVariableOp(%t)                    // only relabels: it waits for the root
    %rows = GatherV2(%read, %ids, 0)              // wants %read as S(1)

The first op that does more than relabel says in which spec it wants its input. `root_spec` goes
back from there to the root, here to S(1) for the table, and the step settles the root and all that
waits for it (`step.settle_root`). Draws are the same: of random numbers that are used split, each
rank draws its part.
"""

from __future__ import annotations

from tfpar.ir.graph import Op, Tensor, Variable
from tfpar.propagation.decide import FREE, OpStrategy
from tfpar.propagation.factors import WHOLE, spec_of, splits_of
from tfpar.propagation.follow import followed_spec, leading_spec
from tfpar.propagation.partitioned_graph import Decision
from tfpar.propagation.state import PropagationState, Root
from tfpar.rules.rule import find_relabelled_inputs
from tfpar.spec import Replicate, Shard, Spec, canonical


def lay_variables(state: PropagationState) -> None:
    """Set the specs of the variables that the plan fixes, and those that follow them; open the
    other weights."""
    specs, variables = state.specs, state.prepared.graph.variables
    for variable in variables:
        spec = state.anchors.variables.get(variable.name)
        if spec is not None:
            specs[variable.handle] = canonical(variable.shape or (), spec, state.mesh)
        elif variable.trainable:
            specs[variable.handle] = FREE
            state.waiting[variable] = []
            state.root_of[variable.handle] = variable
    for variable in variables:
        if variable.handle in specs:
            continue
        if variable not in state.prepared.followed:
            specs[variable.handle] = state.replicated
            continue
        weight, mapping = state.prepared.followed[variable]
        apart = state.anchors.slots.get(weight.name)
        if apart is not None:
            spec = followed_spec(canonical(weight.shape or (), apart, state.mesh), mapping)
            specs[variable.handle] = canonical(variable.shape or (), spec, state.mesh)
            continue
        state.followers.setdefault(weight, []).append((variable, mapping))
        laid = specs[weight.handle]
        if laid is not None:
            specs[variable.handle] = followed_spec(laid, mapping)
        else:  # what reads it first has its say, as what reads the weight first does
            specs[variable.handle] = FREE
            state.root_of[variable.handle] = weight


def find_root(state: PropagationState, op: Op) -> Root | None:
    """Find the root of the output of `op`: `op` if it draws, or what it only relabels."""
    if len(op.outputs) != 1 or state.anchor_of(op.outputs[0]) is not None:
        return None
    moving = [i for i, t in enumerate(op.inputs) if state.is_open(t)]
    if state.prepared.rules[op].drawn and not moving and not state.confined:
        return op
    if len(moving) == 1 and _relabels(state, op, moving[0]):
        return state.root_of[op.inputs[moving[0]]]
    return None


def _relabels(state: PropagationState, op: Op, position: int) -> bool:
    """Whether the open input at `position` has its like in the output of `op`."""
    tensor, rule = op.inputs[position], state.prepared.rules[op]
    if tensor not in state.root_of:
        return False
    others = [t for i, t in enumerate(op.inputs) if i != position]
    if isinstance(state.root_of[tensor], Op):
        # Scaled and compared with scalars: a draw is worth cutting down to the mask it is for.
        alike = rule.inputs[position] == rule.outputs[0] and rule.lower is None
        return alike and all(
            t.num_elements == 1 and state.specs[t] == state.replicated for t in others
        )
    return position in find_relabelled_inputs(op, rule) and all(
        t.op.type == "Const" for t in others
    )


def root_spec(state: PropagationState, tensor: Tensor, want: Spec) -> tuple[Root, Spec]:
    """Return the root of the open `tensor`, and its spec if `tensor` is to come as `want`.

    Partials, and splits that the root does not have, are left out.
    """
    root = state.root_of[tensor]
    start = root.outputs[0] if isinstance(root, Op) else root.handle
    slots = {}
    if isinstance(root, Variable):
        slots = {slot.handle: mapping for slot, mapping in state.followers.get(root, ())}
    while tensor is not start and tensor not in slots:
        op = tensor.op
        rule = state.prepared.rules[op]
        source = next(i for i, t in enumerate(op.inputs) if state.root_of.get(t) is root)
        splits = splits_of(rule.outputs[tensor.index], want, rule.sizes, state.mesh.shape)
        chosen = tuple(WHOLE if s is None else s for s in splits)
        want = spec_of(rule.inputs[source], rule, chosen, state.mesh.shape)
        tensor = op.inputs[source]
    if tensor in slots:
        want = leading_spec(want, slots[tensor])
    return root, tuple(p if isinstance(p, Shard) else Replicate() for p in want)


def draw_with_spec(state: PropagationState, op: Op, spec: Spec) -> Decision:
    """Decide that `op`, which reads nothing that is sharded, makes its output as `spec` where it
    can."""
    rule, mesh = state.prepared.rules[op], state.mesh
    splits = tuple(
        s if s is not None and rule.can_split(s[0]) and rule.takes_pattern(*s) else WHOLE
        for s in splits_of(rule.outputs[0], spec, rule.sizes, mesh.shape)
    )
    made = spec_of(rule.outputs[0], rule, splits, mesh.shape, is_output=True)
    return Decision(OpStrategy(splits, (state.replicated,) * len(op.inputs), (made,)))
