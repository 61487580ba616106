"""Pooling and its gradients: batch and channels split, windows stay whole."""

from __future__ import annotations

from tfpar.ir.constants import Constants
from tfpar.ir.graph import Op
from tfpar.rules.convolution import data_format, image_dims
from tfpar.rules.registry import rule
from tfpar.rules.rule import OpRule, make_rule


def _pooling(op: Op, constants: Constants, notation: str, **fields) -> OpRule | None:
    """`notation` in terms of `{x}`, the image's dims; None where windows span channels."""
    rank = len(op.outputs[0].shape)
    windows = op.attrs.get("ksize")
    if windows is None:  # the V2 kinds take windows and strides as operands
        windows = constants.value(op.inputs[-2])
    x = image_dims(op, rank)
    if windows is None or x is None:
        return None
    batch, channels = (0, 1) if data_format(op).startswith("NC") else (0, rank - 1)
    if len(windows) == rank and (windows[batch] != 1 or windows[channels] != 1):
        return None
    return make_rule(op, notation.format(x=x), **fields)


@rule("MaxPool", "MaxPool3D", "MaxPoolV2")
def _max_pool(op: Op, constants: Constants) -> OpRule | None:
    return _pooling(op, constants, "{x} -> {x}")


@rule("AvgPool", "AvgPool3D")
def _avg_pool(op: Op, constants: Constants) -> OpRule | None:
    return _pooling(op, constants, "{x} -> {x}", linear=((0,),))


@rule("AvgPoolGrad", "AvgPool3DGrad")
def _avg_pool_grad(op: Op, constants: Constants) -> OpRule | None:
    return _pooling(op, constants, "., {x} -> {x}", linear=((1,),), shape_operands={0: 0})


@rule(
    "MaxPoolGrad", "MaxPool3DGrad", "MaxPoolGradV2",
    "MaxPoolGradGrad", "MaxPool3DGradGrad", "MaxPoolGradGradV2",
)  # fmt: skip
def _max_pool_grad(op: Op, constants: Constants) -> OpRule | None:
    return _pooling(op, constants, "{x}, {x}, {x} -> {x}", linear=((2,),))


def _indices_stay(op: Op) -> bool:
    """Whether the flat indices of the maxima do not depend on the batch position."""
    return not op.attrs.get("include_batch_in_index", False)


@rule("MaxPoolWithArgmax")
def _with_argmax(op: Op, constants: Constants) -> OpRule | None:
    # Flat indices count channels, so those stay whole.
    return make_rule(op, "b . . . -> b . . ., b . . .") if _indices_stay(op) else None


@rule("MaxPoolGradWithArgmax")
def _grad_with_argmax(op: Op, constants: Constants) -> OpRule | None:
    if not _indices_stay(op):
        return None
    return make_rule(op, "b . . ., b . . ., b . . . -> b . . .", linear=((1,),))
