"""Where a split that propagation started ends: at the next weight.

A split of its own (see `decide`) is a loan. What Partials were scattered over is gathered again
before it meets a weight, for along a mesh axis that splits no data of the plan's the data comes to
the weights, not they to it. It is gathered where it is made, once for all its readers (the output
of an attention core; the gradients of Q, K and V, which meet a weight on the way to the input's
gradient and the input on the way to the weight's).
"""

from __future__ import annotations

from tfpar.ir.graph import Op, Tensor
from tfpar.propagation.factors import has_factor, splits_of
from tfpar.propagation.view import View, known_spec
from tfpar.spec import Shard, Spec


def ends_at_weight(view: View, tensor: Tensor, axis: int, made: Spec) -> bool:
    """Whether `tensor`, made as `made`, is to be gathered along `axis` for what reads it.

    `axis` is one along which the plan splits no data (`Anchors.data_axes`).
    """
    readers = view.prepared.leaving.get(tensor, ())
    placement = made[axis]
    if not readers or not isinstance(placement, Shard):
        return False
    if placement.dim not in view.prepared.meetings.dims[tensor]:
        return False
    return any(_crosses(view, op, at, tensor, axis, made) for op, at in readers)


def _crosses(view: View, op: Op, at: int, tensor: Tensor, axis: int, made: Spec) -> bool:
    """Whether the weight at input `at` of `op` cannot be split as `tensor` is: it lacks the factor,
    or the plan has split another one."""
    rule, sizes = view.prepared.rules[op], view.mesh.shape
    weight = rule.inputs[at]
    dims = rule.inputs[op.inputs.index(tensor)]
    split = splits_of(dims, made, rule.sizes, sizes)[axis]
    if split is None or not has_factor(weight, split[0]):
        return split is not None
    spec = known_spec(view, op.inputs[at])
    if spec is None or not isinstance(spec[axis], Shard):
        return False
    return splits_of(weight, spec, rule.sizes, sizes)[axis] != split
