"""Pooling and its gradients: batch, channels and spatial dims split.

Spatial dims split where blocks of image and result line up (see `windows`). Where windows overlap,
maxima are taken with a halo (see `halo`). Means do not count padding: there these dims stay whole.
"""

from __future__ import annotations

from collections.abc import Mapping

from tfpar.ir.constants import Constants
from tfpar.ir.graph import Op, Tensor
from tfpar.rules.halo import halo_fields
from tfpar.rules.registry import rule
from tfpar.rules.rule import OpRule, make_rule
from tfpar.rules.windows import image_dims, spatial_dims, windows_of


def _pooling(
    op: Op,
    constants: Constants,
    notation: str,
    image: Tensor,
    result: Tensor,
    *,
    halos: bool = False,
    shape_operands: Mapping[int, int] | None = None,
    linear: tuple[tuple[int, ...], ...] = (),
) -> OpRule | None:
    """`notation` in terms of `{x}`, the image's dims, and `{y}`; None where windows span channels.

    Args:
        halos: the op may run on blocks with halos.
    """
    rank = len(image.shape)
    sizes, strides = op.attrs.get("ksize"), op.attrs.get("strides")
    if sizes is None:  # the V2 kinds take them as operands, which a decomposition does not know
        sizes, strides = (constants.value(t) for t in op.inputs[-2:])
        halos = False
    if sizes is None or strides is None or image_dims(op, rank) is None:
        return None
    spatial = spatial_dims(op, rank)
    if any(sizes[d] != 1 or strides[d] != 1 for d in range(rank) if d not in spatial):
        return None
    windows = windows_of(op, image, result, [sizes[d] for d in spatial], strides, halos)
    x, y = (image_dims(op, rank, spatial=windows.tokens(side)) for side in (True, False))
    fields = halo_fields(op, notation, windows, shape_operands or {}, "max")
    return make_rule(op, notation.format(x=x, y=y), linear=linear, **fields)


@rule("MaxPool", "MaxPool3D", "MaxPoolV2")
def _max_pool(op: Op, constants: Constants) -> OpRule | None:
    return _pooling(op, constants, "{x} -> {y}", op.inputs[0], op.outputs[0], halos=True)


@rule("MaxPoolGrad", "MaxPool3DGrad", "MaxPoolGradV2")
def _max_pool_grad(op: Op, constants: Constants) -> OpRule | None:
    return _pooling(
        op,
        constants,
        "{x}, {y}, {y} -> {x}",
        op.inputs[0],
        op.inputs[1],
        halos=True,
        linear=((2,),),
    )


@rule("MaxPoolGradGrad", "MaxPool3DGradGrad", "MaxPoolGradGradV2")
def _max_pool_grad_grad(op: Op, constants: Constants) -> OpRule | None:
    return _pooling(
        op, constants, "{x}, {y}, {x} -> {y}", op.inputs[0], op.inputs[1], linear=((2,),)
    )


@rule("AvgPool", "AvgPool3D")
def _avg_pool(op: Op, constants: Constants) -> OpRule | None:
    return _pooling(op, constants, "{x} -> {y}", op.inputs[0], op.outputs[0], linear=((0,),))


@rule("AvgPoolGrad", "AvgPool3DGrad")
def _avg_pool_grad(op: Op, constants: Constants) -> OpRule | None:
    return _pooling(
        op,
        constants,
        "., {y} -> {x}",
        op.outputs[0],
        op.inputs[1],
        shape_operands={0: 0},
        linear=((1,),),
    )


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
