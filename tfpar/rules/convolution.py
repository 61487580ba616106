"""Convolutions and their gradients: batch, input and output channels split.

Spatial dims stay whole (they would need halos). A convolution in groups splits along
the batch alone.
"""

from __future__ import annotations

from tfpar.ir.constants import Constants
from tfpar.ir.graph import Op, Tensor
from tfpar.rules.registry import rule
from tfpar.rules.rule import OpRule, make_rule

_FIRST = ("NCHW", "NCDHW", "NCW", "CHANNELS_FIRST")
_KNOWN = (*_FIRST, "NHWC", "NDHWC", "NWC", "CHANNELS_LAST")


def data_format(op: Op, default: str = "NHWC") -> str:
    """The op's `data_format` attribute as text."""
    value = op.attrs.get("data_format", default)
    return value.decode() if isinstance(value, bytes) else value


def image_dims(op: Op, rank: int, batch: str = "b", channels: str = "c") -> str | None:
    """Notation of an image of `rank`: spatial dims whole; None in an exotic data format."""
    layout = data_format(op)
    if layout not in _KNOWN:
        return None
    whole = ["."] * (rank - 2)
    dims = [batch, channels, *whole] if layout in _FIRST else [batch, *whole, channels]
    return " ".join(dims)


def num_channels(op: Op, image: Tensor) -> int:
    return image.shape[1 if data_format(op) in _FIRST else -1]


def _filter_dims(rank: int, ins: str, outs: str) -> str:
    return " ".join([*["."] * (rank - 2), ins, outs])


def _convolution(
    op: Op, image: Tensor, kernel: Tensor, notation: str, reduced: str, **fields
) -> OpRule | None:
    """`notation` in terms of `{x}`, `{k}` and `{y}`, with factors b, i and o."""
    rank = len(image.shape)
    x, y = image_dims(op, rank, "b", "i"), image_dims(op, rank, "b", "o")
    kernel_dims = _filter_dims(rank, "i", "o")
    if x is None or y is None or op.attrs.get("batch_dims", 1) != 1:
        return None
    if num_channels(op, image) != kernel.shape[-2]:
        x = y = image_dims(op, rank, "b", ".")
        kernel_dims = _filter_dims(rank, ".", ".")
    return make_rule(
        op, notation.format(x=x, k=kernel_dims, y=y), reduce={reduced: "sum"}, **fields
    )


@rule("Conv", "Conv2D", "Conv3D")
def _forward(op: Op, constants: Constants) -> OpRule | None:
    return _convolution(op, op.inputs[0], op.inputs[1], "{x}, {k} -> {y}", "i", linear=((0,), (1,)))


@rule("Conv2DBackpropInput", "Conv3DBackpropInputV2")
def _backprop_input(op: Op, constants: Constants) -> OpRule | None:
    return _convolution(
        op, op.outputs[0], op.inputs[1], "., {k}, {y} -> {x}", "o",
        linear=((1,), (2,)), shape_operands={0: 0},
    )  # fmt: skip


@rule("Conv2DBackpropFilter", "Conv3DBackpropFilterV2")
def _backprop_filter(op: Op, constants: Constants) -> OpRule | None:
    return _convolution(
        op, op.inputs[0], op.outputs[0], "{x}, ., {y} -> {k}", "b",
        linear=((0,), (2,)), shape_operands={1: 0},
    )  # fmt: skip


def _depthwise(
    op: Op, kernel: Tensor, notation: str, reduced: str | None, **fields
) -> OpRule | None:
    """Output channel c * m + j is made of input channel c alone: dims `(c m)`."""
    x, y = image_dims(op, 4, "b", "c"), image_dims(op, 4, "b", "(c m)")
    if x is None or y is None:
        return None
    channels, multiplier = kernel.shape[2:]
    return make_rule(
        op, notation.format(x=x, k=". . c m", y=y), sizes={"c": channels, "m": multiplier},
        reduce={reduced: "sum"} if reduced else {}, **fields,
    )  # fmt: skip


@rule("DepthwiseConv2dNative")
def _depthwise_forward(op: Op, constants: Constants) -> OpRule | None:
    return _depthwise(op, op.inputs[1], "{x}, {k} -> {y}", None, linear=((0,), (1,)))


@rule("DepthwiseConv2dNativeBackpropInput")
def _depthwise_backprop_input(op: Op, constants: Constants) -> OpRule | None:
    return _depthwise(
        op, op.inputs[1], "., {k}, {y} -> {x}", "m",
        linear=((1,), (2,)), shape_operands={0: 0},
    )  # fmt: skip


@rule("DepthwiseConv2dNativeBackpropFilter")
def _depthwise_backprop_filter(op: Op, constants: Constants) -> OpRule | None:
    return _depthwise(
        op, op.outputs[0], "{x}, ., {y} -> {k}", "b",
        linear=((0,), (2,)), shape_operands={1: 0},
    )  # fmt: skip


@rule("Dilation2D")
def _dilation(op: Op, constants: Constants) -> OpRule:
    return make_rule(op, "b . . c, . . c -> b . . c")


@rule("Dilation2DBackpropInput")
def _dilation_backprop_input(op: Op, constants: Constants) -> OpRule:
    return make_rule(op, "b . . c, . . c, b . . c -> b . . c", linear=((2,),))


@rule("Dilation2DBackpropFilter")
def _dilation_backprop_filter(op: Op, constants: Constants) -> OpRule:
    return make_rule(op, "b . . c, . . c, b . . c -> . . c", reduce={"b": "sum"}, linear=((2,),))


@rule("ExtractImagePatches", "ExtractVolumePatches")
def _patches(op: Op, constants: Constants) -> OpRule:
    """Channels of a patch: its positions major, the image's channels minor."""
    rank = len(op.inputs[0].shape)
    channels = op.inputs[0].shape[-1]
    whole = ". " * (rank - 2)
    sizes = {"c": channels, "k": op.outputs[0].shape[-1] // max(channels, 1)}
    # Positions cannot split: the input has them spread over its spatial dims.
    notation = f"b {whole}c -> b {whole}(k c)"
    return make_rule(op, notation, sizes=sizes, linear=((0,),))


@rule("SpaceToDepth", "DepthToSpace")
def _space_to_depth(op: Op, constants: Constants) -> OpRule | None:
    """In NHWC and NCHW the block's positions are the major part of the channels."""
    deep, flat = op.outputs[0], op.inputs[0]
    if op.type == "DepthToSpace":
        deep, flat = flat, deep
    if data_format(op) not in ("NHWC", "NCHW"):
        return None
    sizes = {"c": num_channels(op, flat), "k": int(op.attrs["block_size"]) ** 2}
    dims = {deep: image_dims(op, 4, "b", "(k c)"), flat: image_dims(op, 4, "b", "c")}
    return make_rule(
        op, f"{dims[op.inputs[0]]} -> {dims[op.outputs[0]]}", sizes=sizes, monotone=(0,)
    )
