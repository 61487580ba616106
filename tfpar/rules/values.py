"""Ops that make a tensor from a few numbers, and counts and searches that give small ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tfpar.ir.constants import Constants
from tfpar.ir.graph import Op, Tensor
from tfpar.rules.local import LocalOp
from tfpar.rules.registry import rule
from tfpar.rules.rule import OpRule, make_rule, replicate_rule


@rule("Fill")
def _fill(op: Op, constants: Constants) -> OpRule:
    return make_rule(op, "., -> ...", shape_operands={0: 0}, generates=True)


@rule("Empty")
def _empty(op: Op, constants: Constants) -> OpRule:
    return make_rule(op, ". -> ...", shape_operands={0: 0}, generates=True)


@rule("Range", "LinSpace", "InvertPermutation")
def _whole(op: Op, constants: Constants) -> OpRule:
    """Every rank has them in full; most are constants by now (see `fold_constants`)."""
    return replicate_rule(op)


@rule("OneHot")
def _one_hot(op: Op, constants: Constants) -> OpRule:
    names = [f"d{d}" for d in range(len(op.inputs[0].shape))]
    axis = op.attrs.get("axis", -1) % (len(names) + 1)
    out = [*names[:axis], "depth", *names[axis:]]
    return make_rule(
        op,
        f"{' '.join(names)} -> {' '.join(out)}",
        lower=_lower_one_hot,
        any_pattern=names,
        generates=True,
    )


def _lower_one_hot(local: LocalOp) -> Sequence[Tensor]:
    """A rank with classes from `offset` on looks for `index - offset`."""
    if not local.is_split("depth"):
        return local.copy().outputs
    indices, depth, *values = local.inputs
    shifted = local.build.binary("Sub", indices, local.offset("depth", indices.dtype))
    size = local.build.const(np.array(local.local_size("depth")), depth.dtype)
    return local.copy([shifted, size, *values]).outputs


@rule("Bucketize")
def _bucketize(op: Op, constants: Constants) -> OpRule:
    return make_rule(op, "... -> ...")


@rule("LowerBound", "UpperBound")
def _search_sorted(op: Op, constants: Constants) -> OpRule:
    return make_rule(op, "b ., b m -> b m")


@rule("VarIsInitializedOp")
def _is_initialized(op: Op, constants: Constants) -> OpRule:
    names = [f"d{d}" for d in range(len(op.inputs[0].shape))]
    return make_rule(op, f"{' '.join(names)} -> ", reduce=dict.fromkeys(names, "all"))


@rule("DenseBincount")
def _dense_bincount(op: Op, constants: Constants) -> OpRule | None:
    """Counts of a vector add up over its parts; those of a matrix are kept row by row."""
    values, _, weights = op.inputs
    if len(values.shape) == 1:
        if op.attrs.get("binary_output"):
            return None
        notation, reduce = f"n, , {'n' if weights.num_elements else '.'} -> .", {"n": "sum"}
    else:
        row = "b ." if weights.num_elements else " ".join("." * len(weights.shape))
        notation, reduce = f"b ., , {row} -> b .", {}
    return make_rule(
        op, notation, reduce=reduce, masked=False, lower=_lower_bincount, any_pattern=True
    )


def _lower_bincount(local: LocalOp) -> Sequence[Tensor]:
    # Values of `size` and above are not counted.
    bins = local.op.outputs[0].shape[-1]
    return local.copy([local.filled(0, bins), *local.inputs[1:]]).outputs
