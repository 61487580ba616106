"""Noise of roundings: a step in which the operands and results of every sum are moved a little.

Numbers are added up in another order on a mesh, and partial sums are rounded on the way. Here each
operand of an op that adds up is moved by about a rounding of its own dtype, which changes the sum
about as much as another order of it does, whatever cancels; its result is moved likewise. So is
what comes of sums where it is cast to another precision, by a rounding of the coarser one: partial
sums are cast, and cross ranks, in either. What comes of no sum is the same on every rank, and stays
as it is: the decays that an optimizer casts to 16 bits, say, of which it takes small differences.

Some kernels add one number behind the other in the precision of their operands. In 16 bits such a
sum soon stands still: it is too large for the next number to count. A mesh adds shorter sums up,
which are off by less. So the results of these are also moved by about as much as they are off what
the next wider precision gives.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import tensorflow as tf
from tensorflow.core.framework.attr_value_pb2 import AttrValue

from tfpar.tf.interop.graphs import is_body, watched_ops

ROUNDINGS = 1.0
"""The standard deviation of the noise, in units of the dtype's epsilon (empirical)."""

COARSE_ROUNDINGS = 16.0
"""That of noise which shows whether differences grow with it."""

MOVED_ROUNDINGS = 20.0
"""That of values of variables, where nothing else has noise: more than sums are off (empirical)."""

MOVED_TOLERANCE = 1e-4
"""Below it such noise measures nothing: float32 sums in another order (empirical)."""

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


_ONE_BY_ONE = frozenset(
    """
    AvgPool AvgPoolGrad BiasAddGrad Cumsum MaxPoolGrad Mean ResizeBilinearGrad
    ResizeNearestNeighborGrad ScatterNd SegmentMean SegmentSum Sum TensorScatterAdd TensorScatterSub
    UnsortedSegmentSum
    """.split()
)
"""Op types that have a kernel which adds in the precision of its operands (products are added in
float32): on CPUs `BiasAddGrad` in bfloat16, `Sum` over leading dims in float16, scattering in
both."""

_WIDER = {tf.bfloat16: tf.float32, tf.float16: tf.float32, tf.float32: tf.float64}

_DRAWN = frozenset({tf.bfloat16, tf.float16, tf.float32, tf.float64})
"""Dtypes of which TensorFlow draws random numbers."""

_SHORT = frozenset({tf.dtypes.experimental.float8_e4m3fn, tf.dtypes.experimental.float8_e5m2})

_PRODUCTS = ("MatMul", "BatchMatMul", "Conv", "DepthwiseConv", "Einsum")


@contextlib.contextmanager
def rounding_noise(roundings: float = ROUNDINGS) -> Iterator[None]:
    """Sums and casts that are traced inside, in the current graph, its loops and its branches, have
    noise.

    It is drawn anew each time the graph runs. Functions of the user's own that are called keep
    their sums as they are: their traces are used elsewhere too.

    Args:
        roundings: the standard deviation of the noise, in units of the dtype's epsilon.
    """
    graph = tf.compat.v1.get_default_graph()
    streams = itertools.count(1)
    summed: set[Any] = set()

    def moved(x: tf.Tensor, epsilon: float) -> tf.Tensor:
        return _moved(x, roundings * epsilon, next(streams)) if x.dtype in _DRAWN else x

    def comes_of_sums(op_type: str, inputs: Sequence[tf.Tensor], of: Any) -> bool:
        """Whether an op is a sum or reads one; bodies are not followed, so their edges count."""
        is_known = of is graph and not op_type.endswith(("While", "If", "Case", "Call"))
        return not is_known or op_type in SUMS or any(t.ref() in summed for t in inputs)

    def move(op_type: str, inputs: Any, attrs: Any, outputs: Sequence[Any], **_: Any) -> Any:
        ends = [*outputs, *inputs]
        if not ends or not _is_part(ends[0].graph, graph):
            return None
        if not comes_of_sums(op_type, inputs, ends[0].graph):
            return None
        made = with_noise(outputs[0].op) if outputs else None
        written = [t for t in inputs if t.dtype == tf.resource]  # a variable, say
        summed.update(t.ref() for t in (*(made or ()), *written))
        return made

    def with_noise(op: tf.Operation) -> Sequence[tf.Tensor]:
        outputs = op.outputs
        epsilon = functools.partial(_epsilon, op.type)
        if op.type == "Cast" and op.inputs[0].dtype.is_floating:
            (source,), (made,) = op.inputs, outputs
            if made.dtype in _SHORT:  # what is rounded to so few bits says all of the noise before
                op._update_input(0, moved(source, epsilon(source.dtype)))
            if {made.dtype, source.dtype} & _SHORT:
                return outputs
            return [moved(made, max(epsilon(source.dtype), epsilon(made.dtype)))]
        if op.type not in SUMS:
            return outputs
        for i, operand in enumerate(op.inputs):
            if operand.dtype in _DRAWN:
                op._update_input(i, moved(operand, epsilon(operand.dtype)))
        adds_one_by_one = _adds_one_by_one(op)
        made = _moved_by_its_error(op, roundings, next(streams)) if adds_one_by_one else outputs[0]
        return [moved(each, epsilon(each.dtype)) for each in (made, *outputs[1:])]

    with watched_ops(move):
        yield


def _is_part(graph: Any, of: Any) -> bool:
    """Whether `graph` is `of`, or the body of a loop or branch in it."""
    while graph is not of and is_body(graph):
        graph = graph.outer_graph
    return graph is of


def _moved(x: tf.Tensor, deviation: float, stream: int) -> tf.Tensor:
    """`x` with every entry moved in proportion, by numbers drawn from a stream of its own."""
    raw = tf.raw_ops
    drawn = raw.RandomStandardNormal(shape=raw.Shape(input=x), dtype=x.dtype, seed=stream, seed2=1)
    change = raw.Mul(x=drawn, y=tf.constant(deviation, x.dtype))
    return raw.Mul(x=x, y=raw.AddV2(x=change, y=tf.constant(1.0, x.dtype)))


def _adds_one_by_one(op: tf.Operation) -> bool:
    return op.type in _ONE_BY_ONE and op.outputs[0].dtype in _WIDER


def _moved_by_its_error(op: tf.Operation, roundings: float, stream: int) -> tf.Tensor:
    """Move the result of `op` by about its error, which is the difference to wider precision.

    All entries are moved alike, as shorter sums leave off less of all of them.
    """
    raw, (made,) = tf.raw_ops, op.outputs
    wider = _WIDER[made.dtype]
    narrow, wide = made.dtype.as_datatype_enum, wider.as_datatype_enum
    operands = [raw.Cast(x=x, DstT=wider) if x.dtype == made.dtype else x for x in op.inputs]
    attrs = {
        name: AttrValue(type=wide) if value.type == narrow else value
        for name, value in op.node_def.attr.items()
    }
    again = made.graph.create_op(op.type, operands, [wider], attrs=attrs, name="exact")
    (exact,) = again.outputs
    error = raw.Sub(x=raw.Cast(x=made, DstT=wider), y=exact)
    scalar = tf.constant([], tf.int32)
    drawn = raw.RandomStandardNormal(shape=scalar, dtype=wider, seed=stream, seed2=1)
    share = raw.Mul(x=drawn, y=tf.constant(roundings, wider))
    change = raw.Cast(x=raw.Mul(x=share, y=error), DstT=made.dtype)
    return raw.AddV2(x=made, y=change)


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
