"""Image ops: batch and channels split, spatial dims stay whole."""

from __future__ import annotations

from tfpar.ir.constants import Constants
from tfpar.ir.graph import Op, Tensor
from tfpar.rules.local import LocalOp
from tfpar.rules.registry import rule
from tfpar.rules.rule import OpRule, make_rule

_IMAGE = "b . . c"


@rule(
    "ResizeBilinear", "ResizeNearestNeighbor", "ResizeBicubic", "ResizeArea",
    "ResizeNearestNeighborGrad", "ScaleAndTranslate",
)  # fmt: skip
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


def _lower_crops(position: int):
    """Boxes that are padding look at the first image, which there always is."""

    def lower(local: LocalOp) -> list[Tensor]:
        inputs = list(local.inputs)
        inputs[position] = local.filled(position, 0)
        return local.copy(inputs).outputs

    return lower


@rule("CropAndResize")
def _crop(op: Op, constants: Constants) -> OpRule:
    return make_rule(
        op, ". . . c, n ., n -> n . . c", lower=_lower_crops(2), any_pattern=True
    )  # fmt: skip


@rule("CropAndResizeGradBoxes")
def _crop_grad_boxes(op: Op, constants: Constants) -> OpRule:
    return make_rule(
        op, "n . . c, . . . c, n ., n -> n .", reduce={"c": "sum"}, linear=((0,), (1,)),
        lower=_lower_crops(3), any_pattern=True,
    )  # fmt: skip


@rule("CropAndResizeGradImage")
def _crop_grad_image(op: Op, constants: Constants) -> OpRule:
    return make_rule(
        op, "n . . c, n ., n, . -> . . . c", reduce={"n": "sum"}, linear=((0,),),
        shape_operands={3: 0},
    )  # fmt: skip
