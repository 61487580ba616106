"""Final spec of a fresh tensor, in which it is kept.

It is the spec in which it was made, but for three things: a plan may anchor it; Partials are
reduced or scattered where they are not better carried on (`deferral`); and splits that propagation
started end before a weight (`own_splits`). Gradients of 16 bits get the specs of the variables that
they update (`find_narrow_gradients`).
"""

from __future__ import annotations

from collections.abc import Collection

from tfpar.ir.graph import Op, Tensor
from tfpar.ir.traits import REFERENCES
from tfpar.propagation.consumer_spec import preferred_shard
from tfpar.propagation.factors import has_factor, splits_of
from tfpar.propagation.memo_trie import memoize_strategy
from tfpar.propagation.state import PropagationState
from tfpar.propagation.view import View, known_spec
from tfpar.spec import Partial, Placement, Replicate, Shard, Spec, canonical, drop_uneven_shards


def choose_final_spec(state: PropagationState, tensor: Tensor, made: Spec) -> Spec:
    """Choose the spec in which `tensor`, made as `made`, is kept."""
    anchor = state.anchor_of(tensor)
    if anchor is None:
        return resolved_spec(state, tensor, made)
    shape = tensor.shape or ()
    left_open = state.mesh.num_axes - len(anchor)
    if left_open:
        anchor = (*anchor, *resolved_spec(state, tensor, made)[-left_open:])
        anchor = drop_uneven_shards(shape, anchor, state.mesh)
    return canonical(shape, anchor, state.mesh)


def resolved_spec(state: PropagationState, tensor: Tensor, made: Spec) -> Spec:
    """Return the final spec of `tensor`, if nothing anchors it."""
    if state.confined or tensor.dtype in REFERENCES:
        return made
    data_axes = state.anchors.data_axes
    key = resolved_spec, tensor, made
    return memoize_strategy(state, key, lambda view: _resolved(view, tensor, made, data_axes))


def _resolved(view: View, tensor: Tensor, made: Spec, data_axes: Collection[int]) -> Spec:
    if tensor in view.prepared.narrow and not any(isinstance(p, Partial) for p in made):
        kept = _as_updated(view, tensor, made)
    else:
        kept = tuple(
            _kept_along(view, tensor, axis, made, axis in data_axes) for axis in range(len(made))
        )
    # Where it is not as made along one axis, the strides along later ones may not fit.
    return kept if kept == made else drop_uneven_shards(tensor.shape or (), kept, view.mesh)


def _kept_along(view: View, tensor: Tensor, axis: int, made: Spec, splits_data: bool) -> Placement:
    placement = made[axis]
    if isinstance(placement, Partial):
        if _carries(view, tensor, axis, made):
            return placement
        return preferred_shard(view, tensor, axis, made) or Replicate()
    if not splits_data and ends_at_weight(view, tensor, axis, made):
        return Replicate()
    return placement


def _carries(view: View, tensor: Tensor, axis: int, made: Spec) -> bool:
    """Whether `tensor`, made Partial along `axis`, is better carried on than reduced."""
    carry = view.prepared.carried.get(tensor)
    if carry is None or made[axis] is not Partial("sum"):
        return False
    return carry.holds(axis, made, view.mesh, lambda t: known_spec(view, t))


def _as_updated(view: View, tensor: Tensor, made: Spec) -> Spec:
    """`made`, split as the variables that `tensor` updates are split."""
    kept = list(made)
    for axis, placement in enumerate(made):
        if isinstance(placement, Shard):
            wanted = preferred_shard(view, tensor, axis, made)
            kept[axis] = wanted if isinstance(wanted, Shard) else placement
    return tuple(kept)


# --- End of splits that propagation started: at the next weight ---
#
# Queries and keys whose hidden dim is split make partial sums in the attention core. Propagation
# scatters them over the batch or the heads, and each rank computes a part of the scores (see
# `decide`). The plan knows nothing of that: along this axis it splits weights, not data.
#
#     %o: float32[8,64] = ...                    // S(0): propagation split the batch
#     %y: float32[8,32] = MatMul(%o, %w_out)     // w_out: float32[64,32] has no batch
#
# Along such an axis the data comes to the weights, not they to it. So `o` is gathered, where it is
# made, once for all its readers: its product with the weight, and that for the weight's gradient.
# That is so if the weight lacks the factor, as here, or if the plan has split another one of its
# factors. If `o` is split by heads and the plan has split the rows of `w_out` in the same way, or
# not at all, the split goes on.


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
