"""End of splits that propagation started: at the next weight.

Queries and keys whose hidden dim is split make partial sums in the attention core. Propagation
scatters them over the batch or the heads, and each rank computes a part of the scores (see
`decide`). The plan knows nothing of that: along this axis it splits weights, not data.

    %o: float32[8,64] = ...                    // S(0): propagation split the batch
    %y: float32[8,32] = MatMul(%o, %w_out)     // w_out: float32[64,32] has no batch

Along such an axis the data comes to the weights, not they to it. So `o` is gathered, where it is
made, once for all its readers: its product with the weight, and that for the weight's gradient.
That is so if the weight lacks the factor, as here, or if the plan has split another one of its
factors. If `o` is split by heads and the plan has split the rows of `w_out` in the same way, or not
at all, the split goes on.
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
    """Whether the weight at input `at` of `op` does not go with the split of `tensor`: it does not
    have the factor, or the plan has split another one of its factors."""
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
