"""Dims that an op makes of nothing: the rows of a Fill, the classes of a one-hot.

    %zeros: float32[1000,8] = Fill([1000, 8], 0)      // no input has these dims
    %new = AddV2(%zeros, %slot)                       // the plan has %slot as S(0)

No input is split there, so nothing asks for a split but the readers. Where all of them want a
shard, as here, each rank makes only its own part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from tfpar.ir.graph import Op
from tfpar.propagation.consumer_spec import preferred_shard
from tfpar.propagation.factors import REPLICATE
from tfpar.propagation.partitioned_graph import Decision
from tfpar.propagation.view import View
from tfpar.rules.rule import PLAIN, OpRule
from tfpar.spec import Shard


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
