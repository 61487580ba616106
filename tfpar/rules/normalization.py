"""Fused normalisations: channels split directly, what a training step averages over by
decomposition.

Batch normalisation in training takes its statistics over the global batch and all pixels, as one
device would: where one of these dims is split, the op becomes means over it.
"""

from __future__ import annotations

import math

import numpy as np

from tfpar.ir.builder import GraphBuilder
from tfpar.ir.constants import Constants
from tfpar.ir.graph import Graph, Op, Tensor
from tfpar.rules.pseudo import begin_decomposition
from tfpar.rules.registry import rule
from tfpar.rules.rule import SAME, OpRule, make_rule
from tfpar.rules.windows import image_dims, spatial_factors

NUM_AVERAGED = "_tfpar_num_averaged"
"""Attribute of an op that multiplies a variance by `unbiasing`: how many numbers it is of."""


def unbiasing(count: float) -> float:
    """Return the factor that makes the variance of a sample of so many numbers that of what they
    are drawn from."""
    return count / max(count - 1, 1)


@rule("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3", partly_static=True)
def _forward(op: Op, constants: Constants) -> OpRule | None:
    x, averaged = _image(op)
    if x is None:
        return None
    inputs = ", ".join([x, *("c" if t.num_elements else "." for t in op.inputs[1:])])
    notation = f"{inputs} -> {x}, c, c, c, c"
    # What the kernel reserves beside statistics has no shape, and none but its rank reads it.
    if op.attrs.get("is_training", True):
        expand = dict.fromkeys(averaged, _expand_forward)
        return make_rule(op, notation, reduce={"c": SAME}, expand=expand)
    return make_rule(op, notation, reduce=dict.fromkeys(["c", *averaged], SAME))


@rule("FusedBatchNormGrad", "FusedBatchNormGradV2", "FusedBatchNormGradV3", partly_static=True)
def _backward(op: Op, constants: Constants) -> OpRule | None:
    x, averaged = _image(op)
    if x is None:
        return None
    notation = f"{x}, {x}, c, c, c -> {x}, c, c, ., ."
    if op.attrs.get("is_training", True):
        expand = dict.fromkeys(averaged, _expand_backward)
        return make_rule(op, notation, reduce={"c": SAME}, expand=expand)
    if any(t.num_elements for t in op.outputs[3:]):
        return None
    return make_rule(op, notation, reduce={"c": SAME, **dict.fromkeys(averaged, "sum")})


def _image(op: Op) -> tuple[str | None, list[str]]:
    """Notation of the image, and the factors that its statistics are taken over."""
    rank = len(op.inputs[0].shape)
    spatial = spatial_factors(rank)
    return image_dims(op, rank, spatial=spatial), ["b", *spatial]


class _Statistics:
    """Mean and variance over all but the channels, in the dtype of the statistics."""

    def __init__(self, op: Op, build: GraphBuilder, image: Tensor, wide: str) -> None:
        self.build = build
        rank = len(image.shape)
        dims = image_dims(op, rank)
        assert dims is not None
        at = dims.split().index("c")
        self.dims = [d for d in range(rank) if d != at]
        self.broadcast = [n if d == at else 1 for d, n in enumerate(image.shape)]
        self.count = math.prod(image.shape[d] for d in self.dims)
        self.x = build.cast(image, wide)
        self.mean = build.reduce("Mean", self.x, self.dims)
        self.centered = build.binary("Sub", self.x, self.spread(self.mean))
        self.variance = build.reduce("Mean", build.unary("Square", self.centered), self.dims)
        epsilon = build.const(op.attrs.get("epsilon", 1e-4), wide)
        self.rsqrt = build.unary("Rsqrt", build.binary("AddV2", self.variance, epsilon))

    def spread(self, per_channel: Tensor) -> Tensor:
        return self.build.reshape(per_channel, self.broadcast)

    def times(self, x: Tensor, per_channel: Tensor) -> Tensor:
        return self.build.binary("Mul", x, self.spread(per_channel))


def _expand_forward(op: Op, parts: int) -> Graph:
    build, inputs = begin_decomposition(op, "batch_norm")
    image, scale, offset, old_mean, old_variance = inputs
    wide = op.outputs[1].dtype
    s = _Statistics(op, build, image, wide)
    y = s.times(s.centered, build.binary("Mul", s.rsqrt, scale))
    y = build.cast(build.binary("AddV2", y, s.spread(offset)), image.dtype)
    unbiased = build.binary("Mul", s.variance, build.const(unbiasing(s.count), wide))
    unbiased.op.attrs[NUM_AVERAGED] = s.count
    factor = op.attrs.get("exponential_avg_factor", 1.0)
    outputs = [
        y,
        _moved(build, old_mean, s.mean, factor),
        _moved(build, old_variance, unbiased, factor),
        s.mean,
        _reserved(op, build, s),
    ]
    if len(op.outputs) == 6:
        outputs.append(build.const(np.zeros(0), op.outputs[5].dtype))
    build.graph.outputs = outputs
    return build.graph


def _moved(build: GraphBuilder, old: Tensor, new: Tensor, factor: float) -> Tensor:
    """The running average `old` moved by `factor` towards `new`."""
    if factor == 1.0:
        return new
    return build.binary(
        "AddV2",
        build.binary("Mul", old, build.const(1.0 - factor, old.dtype)),
        build.binary("Mul", new, build.const(factor, new.dtype)),
    )


def _reserved(op: Op, build: GraphBuilder, s: _Statistics) -> Tensor:
    """Emit the output that the kernel would hand to its gradient: variances on a CPU, their rsqrt
    on a GPU.

    A gradient op whose batch is not split runs as the kernel, so it must find what the
    device's own kernel writes; a batch of two known numbers tells which that is.
    """
    dtype = op.inputs[0].dtype
    probe = build.const(
        np.array([0.0, 4.0]).reshape(2, *[1] * (len(op.inputs[0].shape) - 1)), dtype
    )
    ones, none = build.const(np.ones(1), s.x.dtype), build.const(np.zeros(0), s.x.dtype)
    outputs = [(probe.shape, dtype), *[((1,), s.x.dtype)] * 4]
    outputs += [(t.shape, t.dtype) for t in op.outputs[5:]]
    attrs = {**op.attrs, "exponential_avg_factor": 1.0}
    if "exponential_avg_factor" not in op.attrs:
        del attrs["exponential_avg_factor"]
    written = build.emit(op.type, (probe, ones, ones, none, none), outputs, attrs).outputs[4]
    # The probe's variance is 4, its rsqrt 1/2.
    is_variance = build.binary("Greater", written, build.const(np.ones(1), s.x.dtype))
    return build.select(is_variance, s.variance, s.rsqrt)


def _expand_backward(op: Op, parts: int) -> Graph:
    """From the image alone, whatever the forward kernel has reserved."""
    build, inputs = begin_decomposition(op, "batch_norm_grad")
    dy, image, scale = inputs[:3]
    wide = op.outputs[1].dtype
    s = _Statistics(op, build, image, wide)
    dy = build.cast(dy, wide)
    normal = s.times(s.centered, s.rsqrt)
    d_scale = build.reduce("Sum", build.binary("Mul", dy, normal), s.dims)
    d_offset = build.reduce("Sum", dy, s.dims)
    inverse = build.const(1.0 / s.count, wide)
    dx = build.binary("Sub", dy, s.spread(build.binary("Mul", d_offset, inverse)))
    dx = build.binary("Sub", dx, s.times(normal, build.binary("Mul", d_scale, inverse)))
    dx = s.times(dx, build.binary("Mul", scale, s.rsqrt))
    unused = [build.const(np.zeros(t.shape), t.dtype) for t in op.outputs[3:]]
    build.graph.outputs = [build.cast(dx, image.dtype), d_scale, d_offset, *unused]
    return build.graph


@rule("LRN")
def _local_response(op: Op, constants: Constants) -> OpRule:
    return make_rule(op, "b h w . -> b h w .")


@rule("LRNGrad")
def _local_response_grad(op: Op, constants: Constants) -> OpRule:
    dims = "b h w ."
    return make_rule(op, f"{dims}, {dims}, {dims} -> {dims}", linear=((0,),))
