"""Where a split that propagation started ends: at the next weight.

A split of its own (see `decide`) is a loan. What Partials were scattered over is gathered again
before it meets a weight, for along a mesh axis that splits no data of the plan's the data comes to
the weights, not they to it. It is gathered where it is made, once for all its readers (the output
of an attention core; the gradients of Q, K and V, which meet a weight on the way to the input's
gradient and the input on the way to the weight's).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfpar.ir.graph import Op, Tensor
from tfpar.propagation.factors import has_factor, splits_of
from tfpar.propagation.partitioned import Anchors
from tfpar.spec import Shard, Spec

if TYPE_CHECKING:
    from tfpar.propagation.engine import Propagation


def axes_of_data(anchors: Anchors) -> frozenset[int]:
    """The mesh axes along which the plan splits what it fixes of the data."""
    given = [*anchors.inputs, *anchors.tensors.values()]
    return frozenset(a for spec in given for a, p in enumerate(spec) if isinstance(p, Shard))


def ends_at_weight(propagation: Propagation, tensor: Tensor, axis: int, made: Spec) -> bool:
    """Whether `tensor`, made as `made`, is to be gathered along `axis` for what reads it."""
    readers = propagation.prepared.leaving.get(tensor, ())
    placement = made[axis]
    if not readers or axis in propagation.axes_of_data or not isinstance(placement, Shard):
        return False
    if placement.dim not in propagation.prepared.meetings.dims[tensor]:
        return False
    return any(_crosses(propagation, op, at, tensor, axis, made) for op, at in readers)


def _crosses(
    propagation: Propagation, op: Op, at: int, tensor: Tensor, axis: int, made: Spec
) -> bool:
    """Whether the weight at input `at` of `op` lacks the factor that splits `tensor`."""
    rule = propagation.prepared.rules[op]
    dims = rule.inputs[op.inputs.index(tensor)]
    split = splits_of(dims, made, rule.sizes, propagation.mesh.shape)[axis]
    return split is not None and not has_factor(rule.inputs[at], split[0])
