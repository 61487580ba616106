"""Reductions over segments: the gradient of a lookup, pooled lookups.

`UnsortedSegment*` may be split by its rows (each rank reduces its own: Partial) and by its segments
(each rank drops the rows of others). Pooled lookups need all rows together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tfpar.ir.constants import Constants
from tfpar.ir.graph import Op, Tensor
from tfpar.rules.indexing import shifted_indices
from tfpar.rules.local import LocalOp
from tfpar.rules.registry import rule
from tfpar.rules.rule import OpRule, make_rule

_UNSORTED = {
    "UnsortedSegmentSum": "sum",
    "UnsortedSegmentMax": "max",
    "UnsortedSegmentMin": "min",
    "UnsortedSegmentProd": "prod",
}


@rule(*_UNSORTED)
def _unsorted_segment(op: Op, constants: Constants) -> OpRule:
    data, ids, _ = op.inputs
    rows = [f"i{d}" for d in range(len(ids.shape))]
    rest = [f"r{d}" for d in range(len(ids.shape), len(data.shape))]
    reduction = _UNSORTED[op.type]
    return make_rule(
        op,
        f"{' '.join([*rows, *rest])}, {' '.join(rows)}, -> {' '.join(['s', *rest])}",
        reduce=dict.fromkeys(rows, reduction),
        linear=((0,),) if reduction == "sum" else (),
        lower=_lower_unsorted,
        any_pattern={*rows, *rest},
        masked=False,
        generates=True,
        sparse=True,
    )


def _lower_unsorted(local: LocalOp) -> Sequence[Tensor]:
    """Rows of padding and of other ranks' segments get a negative id: they are dropped."""
    data, _, count = local.inputs
    build, dropped = local.build, -1
    ids = local.filled(1, dropped)
    if local.is_split("s"):
        moved, inside = shifted_indices(local, ids, ["s"])
        ids = build.select(inside, moved, build.const(dropped, ids.dtype))
        count = build.const(np.array(local.local_size("s")), count.dtype)
    return local.copy([data, ids, count]).outputs


@rule(
    *(f"SparseSegment{kind}WithNumSegments" for kind in ("Sum", "Mean", "SqrtN")),
    *(f"SparseSegment{kind}Grad" for kind in ("Sum", "Mean", "SqrtN")),
)
def _sparse_segment(op: Op, constants: Constants) -> OpRule:
    """Pooled lookups; how many segments there are must be given, or the shape is not static."""
    rest = " ".join(f"r{d}" for d in range(1, len(op.inputs[0].shape)))
    return make_rule(op, f". {rest} -> . {rest}", linear=((0,),))
