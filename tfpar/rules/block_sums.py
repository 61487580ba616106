"""Sums per block of rows: what `ir.passes.block_sums` makes of the gradients of lookups."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tfpar.ir.constants import Constants
from tfpar.ir.graph import DType, Op, Tensor
from tfpar.ir.passes.block_sums import BLOCK_SUM
from tfpar.rules.local import LocalOp
from tfpar.rules.registry import rule
from tfpar.rules.rule import OpRule, make_rule


@rule(BLOCK_SUM)
def _block_sum(op: Op, constants: Constants) -> OpRule:
    rest = " ".join(f"r{d}" for d in range(2, len(op.inputs[0].shape)))
    return make_rule(
        op,
        f"b k {rest}, b k -> b . {rest}",
        reduce={"k": "sum"},
        linear=((0,),),
        lower=_lower,
        pseudo=True,
        any_pattern=True,
        masked=False,
    )


def _lower(local: LocalOp) -> Sequence[Tensor]:
    """One segment sum over all blocks of a rank; rows of padding get a negative id."""
    build, data, (blocks, segments, *rest) = (
        local.build,
        local.inputs[0],
        local.local_output_shape(),
    )
    rows = data.shape[1]
    ids = local.filled(1, -1)
    starts = np.arange(blocks, dtype=ids.dtype)[:, None] * segments
    inside = build.binary("GreaterEqual", ids, build.const(0, ids.dtype))
    moved = build.binary("AddV2", ids, build.const(starts, ids.dtype))
    ids = build.select(inside, moved, build.const(-1, ids.dtype))
    attrs = {"T": DType(data.dtype), "Tindices": DType(ids.dtype), "Tnumsegments": DType("int32")}
    operands = (
        build.reshape(data, (blocks * rows, *rest)),
        build.reshape(ids, (blocks * rows,)),
        build.const(np.int32(blocks * segments)),
    )
    total = build.one("UnsortedSegmentSum", operands, (blocks * segments, *rest), data.dtype, attrs)
    return [build.reshape(total, (blocks, segments, *rest))]
