"""Weights that the plan leaves open and whose first reader has no preference of its own.

    %rows: float32[6,8] = GatherV2(%table, %ids, 0)     // %table is open, %ids: R
    %y:    float32[6,4] = MatMul(%rows, %w)             // the plan has %w as S(0)

Nothing that is read with the table is split, so the lookup has no reason to split anything. But the
product wants its rows split along their second dim, as `w` is. So the table gets S(1): a rank
stores half of it, looks up half of each row, and nothing has to be cut later. The scale of a
normalisation before a split matrix is another such weight.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from tfpar.ir.graph import Op
from tfpar.propagation.consumer_spec import nearest
from tfpar.propagation.decide import FREE, input_specs
from tfpar.propagation.factors import CARRY, REPLICATE, Split, shard_of, size_after, spec_of
from tfpar.propagation.partitioned_graph import Decision
from tfpar.propagation.view import View
from tfpar.rules.rule import PLAIN
from tfpar.spec import Replicate, Shard


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
