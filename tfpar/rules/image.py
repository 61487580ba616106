"""Image ops: batch and channels split; spatial dims where each pixel becomes a block of equal ones,
else they stay whole."""

from __future__ import annotations

import numpy as np

from tfpar.ir.constants import Constants
from tfpar.ir.graph import Op, Tensor
from tfpar.rules.local import LocalOp
from tfpar.rules.registry import rule
from tfpar.rules.rule import Lowering, OpRule, make_rule

_IMAGE = "b . . c"


@rule("ResizeNearestNeighbor", "ResizeNearestNeighborGrad")
def _resize_nearest(op: Op, constants: Constants) -> OpRule:
    """Scaled by a whole number, blocks of either image are made of blocks of the other."""
    small, large = op.inputs[0], op.outputs[0]
    if op.type == "ResizeNearestNeighborGrad":
        small, large = large, small
    tokens: dict[Tensor, list[str]] = {small: [], large: []}
    sizes: dict[str, int] = {}
    for dim, factor in enumerate("hw", start=1):
        few, many = small.shape[dim], large.shape[dim]
        times = many // max(few, 1)
        exact = few * times == many and _is_exact(op, times)
        tokens[small].append(factor if exact else ".")
        tokens[large].append((f"({factor} .{times})" if times > 1 else factor) if exact else ".")
        sizes |= {factor: few} if exact else {}
    x, y = (" ".join(["b", *tokens[t], "c"]) for t in (op.inputs[0], op.outputs[0]))
    return make_rule(
        op, f"{x} -> {y}", sizes=sizes, linear=((0,),), lower=_lower_resize, any_pattern=True
    )


def _is_exact(op: Op, times: int) -> bool:
    """Whether pixels of the large image lie in the same place of a block, wherever that is.

    Their place is computed in float32: without half pixels, on the edge of what is rounded.
    """
    if op.attrs.get("align_corners", False):
        return False
    return bool(op.attrs.get("half_pixel_centers", False)) or times & (times - 1) == 0


def _lower_resize(local: LocalOp) -> list[Tensor]:
    size = np.array(local.local_output_shape()[1:3], np.int32)
    return local.copy([local.inputs[0], local.build.const(size)]).outputs


@rule("ResizeBilinear", "ResizeBicubic", "ResizeArea", "ScaleAndTranslate")
def _resize(op: Op, constants: Constants) -> OpRule:
    return make_rule(op, f"{_IMAGE} -> {_IMAGE}", linear=((0,),))


@rule("ResizeBilinearGrad", "ResizeBicubicGrad", "ScaleAndTranslateGrad")
def _resize_grad(op: Op, constants: Constants) -> OpRule:
    """The second operand is the original image, for its shape alone."""
    return make_rule(op, f"{_IMAGE}, {_IMAGE} -> {_IMAGE}", linear=((0,),))


@rule("ImageProjectiveTransformV2", "ImageProjectiveTransformV3")
def _projective_transform(op: Op, constants: Constants) -> OpRule:
    # One transform serves all images, or each has its own.
    return make_rule(op, f"{_IMAGE}, b . -> {_IMAGE}")


@rule("AdjustContrastv2")
def _adjust_contrast(op: Op, constants: Constants) -> OpRule:
    return make_rule(op, "... . . c, -> ... . . c")


@rule("AdjustHue", "AdjustSaturation")
def _adjust_color(op: Op, constants: Constants) -> OpRule:
    return make_rule(op, "... ., -> ... .")


@rule("RGBToHSV", "HSVToRGB")
def _color_space(op: Op, constants: Constants) -> OpRule:
    return make_rule(op, "... . -> ... .")


def _lower_crops(position: int) -> Lowering:
    """Boxes that are padding look at the first image, which there always is."""

    def lower(local: LocalOp) -> list[Tensor]:
        inputs = list(local.inputs)
        inputs[position] = local.filled(position, 0)
        return local.copy(inputs).outputs

    return lower


@rule("CropAndResize")
def _crop(op: Op, constants: Constants) -> OpRule:
    return make_rule(op, ". . . c, n ., n -> n . . c", lower=_lower_crops(2), any_pattern=True)


@rule("CropAndResizeGradBoxes")
def _crop_grad_boxes(op: Op, constants: Constants) -> OpRule:
    return make_rule(
        op,
        "n . . c, . . . c, n ., n -> n .",
        reduce={"c": "sum"},
        linear=((0,), (1,)),
        lower=_lower_crops(3),
        any_pattern=True,
    )


@rule("CropAndResizeGradImage")
def _crop_grad_image(op: Op, constants: Constants) -> OpRule:
    return make_rule(
        op,
        "n . . c, n ., n, . -> . . . c",
        reduce={"n": "sum"},
        linear=((0,),),
        shape_operands={3: 0},
    )
