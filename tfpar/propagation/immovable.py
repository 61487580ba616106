"""Immovable inputs, and the errors that follow where they exclude each other.

Variables and lists keep their specs; in the body of a loop or branch nothing crosses ranks.
"""

from __future__ import annotations

from tfpar.ir.graph import Op, Tensor
from tfpar.ir.traits import REFERENCES
from tfpar.propagation.decide import ImmovableInputError
from tfpar.propagation.reshard import lower_reshard
from tfpar.propagation.state import PropagationState
from tfpar.spec import Spec, SpecError, format_spec


class RetryWithWholeLists(Exception):
    """Lists came out in a spec that a later op cannot take: their makers must not split.

    Only `engine.with_lists_whole` catches it.
    """

    def __init__(self, ops: frozenset[tuple[Op, int]]) -> None:
        super().__init__(ops)
        self.ops = ops


def check_immovable(state: PropagationState, tensor: Tensor, need: Spec) -> None:
    """Raise ImmovableInputError if `tensor` is a variable or a list with another spec than
    `need`."""
    have = state.spec(tensor)
    if have != need and tensor.dtype in REFERENCES and not state.is_loose(tensor):
        raise ImmovableInputError(*(a for a, p in enumerate(have) if p != need[a]))


def check_local(state: PropagationState, tensor: Tensor, need: Spec) -> None:
    """Raise ImmovableInputError if `tensor` cannot come as `need` without crossing ranks."""
    check_immovable(state, tensor, need)
    steps = lower_reshard(tuple(tensor.shape or ()), state.spec(tensor), need, state.mesh)
    axes = {a for step in steps if step.is_collective for a in step.axes}
    if axes:
        raise ImmovableInputError(*sorted(axes))


def make_immovable_error(state: PropagationState, op: Op, error: ImmovableInputError) -> Exception:
    """Return the exception to raise where `op` cannot run for what it reads.

    In a body, `error` itself, for the op around it. Else, if lists stand in the way whose makers
    need not have split, `RetryWithWholeLists`; and if it is variables, what a user can read.
    """
    if state.confined:
        return error
    held = {(maker, a) for maker in _makers_of_lists(op) for a in error.axes} - state.whole
    if held:
        return RetryWithWholeLists(frozenset(held))
    names = {v.handle: v.name for v in state.prepared.graph.variables}
    pinned = ", ".join(
        f"{names.get(t, t.name)} as {format_spec(spec)}"
        for t in op.inputs
        if (spec := state.specs[t]) is not None and (t in names or t.dtype in REFERENCES)
    )
    return SpecError(
        f"{op.type} {op.name!r} cannot run with {pinned}: along mesh axis "
        f"{state.mesh.axis_names[error.axes[0]]!r} they exclude each other. Give these variables "
        f"the same sharding, or leave one of them to propagation."
    )


def _makers_of_lists(op: Op) -> set[Op]:
    """The ops that `op`'s tensor lists went through."""
    found: set[Op] = set()
    stack = [op]
    while stack:
        for tensor in stack.pop().inputs:
            if tensor.dtype == "variant" and tensor.op not in found:
                found.add(tensor.op)
                stack.append(tensor.op)
    return found
