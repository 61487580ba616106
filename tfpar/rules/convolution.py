"""Convolutions and their gradients: batch, channels and spatial dims split.

Spatial dims split where blocks of image and result line up (see `windows`); where windows overlap,
by a decomposition with halo exchange (see `halo`). In groups, channels stay whole.
"""

from __future__ import annotations

from typing import NamedTuple

from tfpar.ir.constants import Constants
from tfpar.ir.graph import Op, Tensor
from tfpar.rules.halo import HaloFields, halo_fields
from tfpar.rules.registry import rule
from tfpar.rules.rule import OpRule, make_rule
from tfpar.rules.windows import (
    Windows,
    channels_first,
    data_format,
    image_dims,
    spatial_dims,
    windows_of,
)


def num_channels(op: Op, image: Tensor) -> int:
    channels: int = image.shape[1 if channels_first(op) else -1]
    return channels


def _filter_dims(rank: int, ins: str, outs: str) -> str:
    return " ".join([*["."] * (rank - 2), ins, outs])


def _windows(op: Op, image: Tensor, kernel: Tensor, result: Tensor) -> Windows:
    return windows_of(op, image, result, kernel.shape[:-2], op.attrs["strides"])


class _Direction(NamedTuple):
    """A convolution or one of its gradients: what it makes of what.

    Attributes:
        notation: in terms of the image `{x}`, the filter `{k}` and the result `{y}`.
        image, kernel, result: the positions of these among the op's inputs; None: its output.
        shape_operands: as of `make_rule`.
    """

    notation: str
    image: int | None
    kernel: int | None
    result: int | None
    shape_operands: dict[int, int]

    def tensors(self, op: Op) -> tuple[Tensor, Tensor, Tensor]:
        """Return the image, the filter and the result."""
        x, k, y = (
            op.outputs[0] if position is None else op.inputs[position]
            for position in (self.image, self.kernel, self.result)
        )
        return x, k, y

    @property
    def linear(self) -> tuple[tuple[int, ...], ...]:
        """Whose inputs it is linear in: those that are no shapes."""
        return tuple((i,) for i in (self.image, self.kernel, self.result) if i is not None)


_FORWARD = _Direction("{x}, {k} -> {y}", 0, 1, None, {})
_TO_IMAGE = _Direction("., {k}, {y} -> {x}", None, 1, 2, {0: 0})
_TO_FILTER = _Direction("{x}, ., {y} -> {k}", 0, None, 2, {1: 0})


def _spatial_fields(
    op: Op, direction: _Direction, windows: Windows, reduced: str | None
) -> HaloFields:
    """The arguments of `make_rule` for the spatial dims, and what is summed over."""
    fields = halo_fields(op, direction.notation, windows, direction.shape_operands)
    sums = [reduced] if reduced else []
    if direction is _TO_FILTER:  # which lacks the spatial dims too
        sums += [w.factor for w in windows.splits]
    fields["reduce"] = dict.fromkeys(sums, "sum")
    return fields


def _convolution(op: Op, direction: _Direction, reduced: str) -> OpRule | None:
    """With factors b, i, o and the spatial ones."""
    image, kernel, result = direction.tensors(op)
    rank = len(image.shape)
    if image_dims(op, rank) is None or op.attrs.get("batch_dims", 1) != 1:
        return None
    windows = _windows(op, image, kernel, result)
    ins, outs = ("i", "o") if num_channels(op, image) == kernel.shape[-2] else (".", ".")
    inner, outer = windows.tokens(in_image=True), windows.tokens(in_image=False)
    return make_rule(
        op,
        direction.notation.format(
            x=image_dims(op, rank, "b", ins, inner),
            k=_filter_dims(rank, ins, outs),
            y=image_dims(op, rank, "b", outs, outer),
        ),
        **_spatial_fields(op, direction, windows, reduced),
        linear=direction.linear,
    )


@rule("Conv", "Conv2D", "Conv3D")
def _forward(op: Op, constants: Constants) -> OpRule | None:
    return _convolution(op, _FORWARD, "i")


@rule("Conv2DBackpropInput", "Conv3DBackpropInputV2")
def _backprop_input(op: Op, constants: Constants) -> OpRule | None:
    return _convolution(op, _TO_IMAGE, "o")


@rule("Conv2DBackpropFilter", "Conv3DBackpropFilterV2")
def _backprop_filter(op: Op, constants: Constants) -> OpRule | None:
    return _convolution(op, _TO_FILTER, "b")


def _depthwise(op: Op, direction: _Direction, reduced: str | None) -> OpRule | None:
    """Output channel c * m + j is made of input channel c alone: dims `(c m)`."""
    image, kernel, result = direction.tensors(op)
    if image_dims(op, 4) is None:
        return None
    windows = _windows(op, image, kernel, result)
    inner, outer = windows.tokens(in_image=True), windows.tokens(in_image=False)
    spatial = _spatial_fields(op, direction, windows, reduced)
    channels, multiplier = kernel.shape[2:]
    spatial["sizes"] |= {"c": channels, "m": multiplier}
    return make_rule(
        op,
        direction.notation.format(
            x=image_dims(op, 4, "b", "c", inner),
            k=". . c m",
            y=image_dims(op, 4, "b", "(c m)", outer),
        ),
        **spatial,
        linear=direction.linear,
    )


@rule("DepthwiseConv2dNative")
def _depthwise_forward(op: Op, constants: Constants) -> OpRule | None:
    return _depthwise(op, _FORWARD, None)


@rule("DepthwiseConv2dNativeBackpropInput")
def _depthwise_backprop_input(op: Op, constants: Constants) -> OpRule | None:
    return _depthwise(op, _TO_IMAGE, "m")


@rule("DepthwiseConv2dNativeBackpropFilter")
def _depthwise_backprop_filter(op: Op, constants: Constants) -> OpRule | None:
    return _depthwise(op, _TO_FILTER, "b")


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
    """In NHWC and NCHW the block's positions are the major part of the channels.

    Spatial dims split into whole blocks.
    """
    deep, flat = op.outputs[0], op.inputs[0]
    if op.type == "DepthToSpace":
        deep, flat = flat, deep
    if data_format(op) not in ("NHWC", "NCHW"):
        return None
    block = int(op.attrs["block_size"])
    height, width = (deep.shape[d] for d in spatial_dims(op, 4))
    sizes = {"c": num_channels(op, flat), "k": block**2, "h": height, "w": width}
    dims = {
        deep: image_dims(op, 4, "b", "(k c)", ["h", "w"]),
        flat: image_dims(op, 4, "b", "c", [f"(h .{block})", f"(w .{block})"]),
    }
    return make_rule(
        op, f"{dims[op.inputs[0]]} -> {dims[op.outputs[0]]}", sizes=sizes, monotone=(0,)
    )
