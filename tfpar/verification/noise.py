"""Noise of roundings: a step in which the operands and results of every sum are moved a little.

Numbers are added up in another order on a mesh, and partial sums are rounded on the way. Here each
operand of an op that adds up is moved by about a rounding of its own dtype, which changes the sum
about as much as another order of it does, whatever cancels; its result is moved likewise. So is
what is cast to another precision, by a rounding of the coarser one: partial sums are cast, and
cross ranks, in either.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import tensorflow as tf
from tensorflow.python.framework import op_callbacks
from tensorflow.python.ops.control_flow_v2_func_graphs import (
    CondBranchFuncGraph,
    WhileBodyFuncGraph,
)

ROUNDINGS = 1.0
"""The standard deviation of the noise, in units of the dtype's epsilon (empirical)."""

SUMS = frozenset(
    """
    AddN AvgPool AvgPool3D AvgPool3DGrad AvgPoolGrad BatchMatMul BatchMatMulV2 BatchMatMulV3
    BiasAddGrad Conv Conv2D Conv2DBackpropFilter Conv2DBackpropInput Conv3D Conv3DBackpropFilterV2
    Conv3DBackpropInputV2 CropAndResizeGradBoxes CropAndResizeGradImage CumulativeLogsumexp Cumprod
    Cumsum DepthwiseConv2dNative DepthwiseConv2dNativeBackpropFilter
    DepthwiseConv2dNativeBackpropInput Dilation2DBackpropFilter Dilation2DBackpropInput Einsum
    EuclideanNorm FFT FFT2D FFT3D FusedBatchNorm FusedBatchNormGrad FusedBatchNormGradV2
    FusedBatchNormGradV3 FusedBatchNormV2 FusedBatchNormV3 IFFT IFFT2D IFFT3D IRFFT IRFFT2D IRFFT3D
    L2Loss LRN LRNGrad LogSoftmax MatMul MatrixDeterminant MatrixInverse MatrixSolve
    MatrixTriangularSolve MaxPoolGrad Mean Prod RFFT RFFT2D RFFT3D ResizeBicubicGrad
    ResizeBilinearGrad ResizeNearestNeighborGrad ScatterNd SegmentMean SegmentSum Softmax
    SoftmaxCrossEntropyWithLogits SparseMatMul SparseSegmentMean SparseSegmentMeanGrad
    SparseSegmentSqrtN SparseSegmentSqrtNGrad SparseSegmentSum SparseSegmentSumGrad
    SparseSoftmaxCrossEntropyWithLogits StridedSliceGrad Sum TensorScatterAdd TensorScatterSub
    TridiagonalMatMul UnsortedSegmentProd UnsortedSegmentSum
    """.split()
)
"""Op types that add up (or multiply) many numbers. One that is missing makes the noise smaller."""


_PRODUCTS = ("MatMul", "BatchMatMul", "Conv", "DepthwiseConv", "Einsum")


@contextlib.contextmanager
def rounding_noise() -> Iterator[None]:
    """Sums and casts that are traced inside, in the current graph, its loops and its branches, have
    noise.

    It is drawn anew each time the graph runs. Functions of the user's own that are called keep
    their sums as they are: their traces are used elsewhere too.
    """
    graph = tf.compat.v1.get_default_graph()
    streams = itertools.count(1)

    def moved(x: tf.Tensor, epsilon: float) -> tf.Tensor:
        return _moved(x, epsilon, next(streams)) if x.dtype.is_floating else x

    def move(op_type: str, inputs: Any, attrs: Any, outputs: Sequence[Any], **_: Any) -> Any:
        if not outputs or not _is_part(outputs[0].graph, graph):
            return None
        op = outputs[0].op
        epsilon = functools.partial(_epsilon, op_type)
        if op_type == "Cast" and op.inputs[0].dtype.is_floating:
            (source,), (made,) = op.inputs, outputs
            return [moved(made, max(epsilon(source.dtype), epsilon(made.dtype)))]
        if op_type not in SUMS:
            return None
        for i, operand in enumerate(op.inputs):
            if operand.dtype.is_floating:
                op._update_input(i, moved(operand, epsilon(operand.dtype)))
        return [moved(made, epsilon(made.dtype)) for made in outputs]

    op_callbacks.add_op_callback(move)
    try:
        yield
    finally:
        op_callbacks.remove_op_callback(move)


def _is_part(graph: Any, of: Any) -> bool:
    """Whether `graph` is `of`, or the body of a loop or branch in it."""
    while graph is not of and isinstance(graph, (CondBranchFuncGraph, WhileBodyFuncGraph)):
        graph = graph.outer_graph
    return graph is of


def _moved(x: tf.Tensor, epsilon: float, stream: int) -> tf.Tensor:
    """`x` with every entry moved by some roundings, drawn from a stream of its own."""
    raw = tf.raw_ops
    drawn = raw.RandomStandardNormal(shape=raw.Shape(input=x), dtype=x.dtype, seed=stream, seed2=1)
    change = raw.Mul(x=drawn, y=tf.constant(ROUNDINGS * epsilon, x.dtype))
    return raw.Mul(x=x, y=raw.AddV2(x=change, y=tf.constant(1.0, x.dtype)))


def _epsilon(op_type: str, dtype: tf.DType) -> float:
    """The spacing of numbers at 1, as ops of this type compute; 0 of integers."""
    if not dtype.is_floating:
        return 0.0
    if dtype == tf.float32 and op_type.startswith(_PRODUCTS) and _computes_in_tf32():
        return 2.0**-10
    return float(ml_dtypes.finfo(dtype.as_numpy_dtype).eps)


def _computes_in_tf32() -> bool:
    """Whether GPUs may round operands of products to TensorFloat-32; which kernel does depends on
    the shapes, so that a mesh's may where one device's does not."""
    allowed = tf.config.experimental.tensor_float_32_execution_enabled()
    return allowed and bool(tf.config.list_logical_devices("GPU"))
