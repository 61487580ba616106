"""A wrong rule for each family of ops, and a step in which an op of that family matters.

Every rule here is well-formed and wrong: it drops a partial sum, takes entries of an order for
entries that are all alike, forgets an offset. The steps split nothing but the batch, so each puts
the batch where the op is particular: rows to add up, to order, to transform.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfpar.ir import BLOCK_SUM, Constants, DType, Graph, Op
from tfpar.rules import SAME, LocalOp, OpRule, RuleFunction, make_rule

ROWS, COLUMNS = 8, 4

Wrong = Callable[[RuleFunction], RuleFunction]


@dataclasses.dataclass(frozen=True)
class Planted:
    """An error in the rules.

    Attributes:
        op_type: whose rule is wrong; plant: makes the wrong rule of the right one.
        step: what the model computes of its batch, (ROWS, COLUMNS), and a variable of
            (COLUMNS,) that it may update.
    """

    op_type: str
    plant: Wrong
    step: Callable[[tf.Tensor, tf.Variable], tf.Tensor]


# --- ways to be wrong -------------------------------------------------------------------


def changed(change: Callable[[OpRule], OpRule]) -> Wrong:
    def plant(right: RuleFunction) -> RuleFunction:
        def wrong(op: Op, constants: Constants) -> OpRule | None:
            found = right(op, constants)
            return None if found is None else change(found)

        return wrong

    return plant


@changed
def drops_sums(rule: OpRule) -> OpRule:
    """What is to be added up over the ranks is taken for the same on each."""
    return dataclasses.replace(rule, reduce=dict.fromkeys(rule.reduce, SAME))


@changed
def knows_no_neighbours(rule: OpRule) -> OpRule:
    """What needs the other blocks of a dim is computed of the rank's own."""
    everywhere = dict.fromkeys(rule.expand, SAME)
    return dataclasses.replace(rule, expand={}, blocks={}, reduce={**everywhere, **rule.reduce})


@changed
def is_linear(rule: OpRule) -> OpRule:
    """Partial sums pass as if the op were only another name."""
    return dataclasses.replace(rule, monotone=(0,))


def is_alike(notation: str, shape: tuple[int, ...] | None = None, **fields: Any) -> Wrong:
    """Entries of a dim in which positions matter are taken one by one.

    Args:
        shape: only for ops with an input of this shape.
    """

    def plant(right: RuleFunction) -> RuleFunction:
        def wrong(op: Op, constants: Constants) -> OpRule | None:
            if shape is not None and shape not in [t.shape for t in op.inputs]:
                return right(op, constants)
            return make_rule(op, notation, **fields)

        return wrong

    return plant


def runs_as(lower: Callable[[LocalOp], Any]) -> Wrong:
    """The op of a rank is emitted by `lower`."""
    return changed(lambda rule: dataclasses.replace(rule, lower=lower))


def adds_its_own(position: int) -> Wrong:
    """Partial sums are written to a variable as they are."""
    return changed(lambda rule: dataclasses.replace(rule, linear=((position,),)))


# --- what a step computes ---------------------------------------------------------------


def lookup(x: tf.Tensor, _: tf.Variable) -> tf.Tensor:
    """The gradient of a lookup in two tables of three rows."""
    tables = tf.constant(np.arange(12, dtype="float32").reshape(2, 3, 2))
    values = tf.transpose(x[:, :2])
    at = tf.cast(tf.minimum(tf.abs(values), 2.0), tf.int32)
    with tf.GradientTape() as tape:
        tape.watch(tables)
        found = tf.gather(tables, at, batch_dims=1)
        total = tf.reduce_sum(tf.sin(found) * values[..., None])
    return tape.gradient(total, tables)


def filter_gradient(x: tf.Tensor, _: tf.Variable) -> tf.Tensor:
    images = tf.reshape(x, (ROWS, 2, 2, 1))
    return tf.raw_ops.Conv2DBackpropFilter(
        input=images,
        filter_sizes=[1, 1, 1, 1],
        out_backprop=images * images,
        strides=[1, 1, 1, 1],
        padding="VALID",
    )


def contrast(x: tf.Tensor, _: tf.Variable) -> tf.Tensor:
    image = tf.reshape(x, (1, ROWS, COLUMNS, 1))
    return tf.raw_ops.AdjustContrastv2(images=image, contrast_factor=3.0)


def fourier(x: tf.Tensor, _: tf.Variable) -> tf.Tensor:
    return tf.abs(tf.signal.fft(tf.cast(tf.transpose(x), tf.complex64)))


def unrolled(x: tf.Tensor, _: tf.Variable) -> tf.Tensor:
    handle = tf.raw_ops.TensorListFromTensor(tensor=tf.transpose(x), element_shape=[ROWS])
    items = [
        tf.raw_ops.TensorListGetItem(
            input_handle=handle, index=i, element_shape=[ROWS], element_dtype=tf.float32
        )
        for i in range(COLUMNS)
    ]
    return items[0] - 2.0 * items[-1]


def normalized(x: tf.Tensor, _: tf.Variable) -> tf.Tensor:
    ones, none = tf.ones(1), tf.zeros(0)
    return tf.raw_ops.FusedBatchNormV3(
        x=tf.reshape(x, (ROWS, 2, 2, 1)),
        scale=ones,
        offset=ones,
        mean=none,
        variance=none,
        epsilon=1e-3,
        is_training=True,
    )[0]


def descent(x: tf.Tensor, variable: tf.Variable) -> tf.Tensor:
    tf.raw_ops.ResourceApplyGradientDescent(
        var=variable.handle, alpha=0.5, delta=tf.reduce_sum(x, 0)
    )
    return x


def written(x: tf.Tensor, variable: tf.Variable) -> tf.Tensor:
    variable.assign_add(tf.reduce_sum(x, 0))
    return x


def pooled(x: tf.Tensor, _: tf.Variable) -> tf.Tensor:
    return tf.nn.max_pool2d(tf.reshape(x, (1, ROWS, COLUMNS, 1)), 3, 1, "SAME")


def drawn(x: tf.Tensor, _: tf.Variable) -> tf.Tensor:
    return x * tf.random.stateless_uniform((ROWS, COLUMNS), seed=[1, 2])


def scattered(x: tf.Tensor, _: tf.Variable) -> tf.Tensor:
    return tf.scatter_nd(tf.constant(np.arange(ROWS)[:, None] % 3), x, (3, COLUMNS))


def summed_by_segment(x: tf.Tensor, _: tf.Variable) -> tf.Tensor:
    return tf.math.unsorted_segment_sum(x, tf.constant(np.arange(ROWS) % 3), 3)


def counted(x: tf.Tensor, _: tf.Variable) -> tf.Tensor:
    values = tf.cast(tf.round(tf.abs(x[:, 0])), tf.int32)
    weights = tf.zeros(0, tf.int32)
    counts = tf.raw_ops.DenseBincount(input=values, size=3, weights=weights)
    return tf.cast(counts, tf.float32)


def _takes_the_first(local: LocalOp) -> Any:
    handle, index, shape = local.inputs
    first = local.build.const(0, index.dtype)
    given = local.build.const(np.array(handle.shape[1:]), shape.dtype)
    return local.copy([handle, first, given]).outputs


def _draws_the_first(local: LocalOp) -> Any:
    shape = local.build.shape_const(local.local_output_shape())
    return local.copy([shape, *local.inputs[1:]]).outputs


def _starts_at_zero(right: RuleFunction) -> RuleFunction:
    """Blocks do not know where they start."""

    def wrong(op: Op, constants: Constants) -> OpRule | None:
        found = right(op, constants)
        assert found is not None and found.lower is not None
        lower = found.lower

        def from_zero(local: LocalOp) -> Any:
            view, starts, counts = lower(local)
            return [view, local.build.binary("Sub", starts, starts), counts]

        return dataclasses.replace(found, lower=from_zero)

    return wrong


def attended(x: tf.Tensor, _: tf.Variable) -> tf.Tensor:
    return tf.matmul(tf.nn.softmax(tf.matmul(x, x, transpose_b=True)), x)


@changed
def _sees_its_own_alone(rule: OpRule) -> OpRule:
    """In each turn a rank has the columns of the first."""

    def without_sending(build: Callable[[Op, int], Graph]) -> Callable[[Op, int], Graph]:
        def built(op: Op, parts: int) -> Graph:
            graph = build(op, parts)
            for each in graph.ops:
                if each.type == "TfparPermutation":
                    each.type, each.attrs = "Identity", {"T": DType(each.inputs[0].dtype)}
            return graph

        return built

    expand = {factor: without_sending(build) for factor, build in rule.expand.items()}
    return dataclasses.replace(rule, expand=expand)


def _stays(local: LocalOp) -> Any:
    return [local.inputs[0]]


PLANTED: dict[str, Planted] = {
    "attention": Planted("TfparAttention", _sees_its_own_alone, attended),
    "attention_chunks": Planted("TfparPermutation", runs_as(_stays), attended),
    "block_sums": Planted(BLOCK_SUM, drops_sums, lookup),
    "convolution": Planted("Conv2DBackpropFilter", drops_sums, filter_gradient),
    "diagonals": Planted(
        "MatrixBandPart", is_alike("r c -> r c"), lambda x, _: tf.linalg.band_part(x, 0, -1)
    ),
    "image": Planted("AdjustContrastv2", is_alike("b h w c,  -> b h w c"), contrast),
    "indexing": Planted(
        "GatherV2", drops_sums, lambda x, _: tf.gather(x, tf.constant([7, 0, 3]), axis=0)
    ),
    "layout": Planted(
        "Reshape",
        is_alike("a b, . -> b a", (ROWS, COLUMNS), shape_operands={1: 0}),
        lambda x, _: tf.reshape(x, (COLUMNS, ROWS)),
    ),
    "matrix": Planted("FFT", is_alike("... -> ..."), fourier),
    "lists": Planted("TensorListGetItem", runs_as(_takes_the_first), unrolled),
    "linalg": Planted("MatMul", drops_sums, lambda x, _: tf.matmul(x, x, transpose_a=True)),
    "normalization": Planted("FusedBatchNormV3", knows_no_neighbours, normalized),
    "optimizer_ops": Planted("ResourceApplyGradientDescent", adds_its_own(2), descent),
    "pieces": Planted(
        "Split",
        is_alike(", (d .2) e -> d e, d e", (ROWS, COLUMNS), sizes={"d": ROWS // 2}),
        lambda x, _: tf.split(x, 2)[0],
    ),
    "pointwise": Planted("Square", is_linear, lambda x, _: tf.square(tf.reduce_sum(x, 0))),
    "pooling": Planted("MaxPool", knows_no_neighbours, pooled),
    "pseudo": Planted(
        "TfparBlocks", _starts_at_zero, lambda x, _: tf.cast(tf.argmax(x, 0), tf.float32)
    ),
    "random": Planted("StatelessRandomUniformV2", runs_as(_draws_the_first), drawn),
    "reduction": Planted("Sum", drops_sums, lambda x, _: tf.reduce_sum(x, 0)),
    "scatter": Planted("ScatterNd", drops_sums, scattered),
    "segments": Planted("UnsortedSegmentSum", drops_sums, summed_by_segment),
    "slicing": Planted("ReverseV2", is_alike("a b -> a b"), lambda x, _: tf.reverse(x, [0])),
    "softmax": Planted("Softmax", knows_no_neighbours, lambda x, _: tf.nn.softmax(tf.transpose(x))),
    "sorting": Planted("Cumsum", is_alike("a b -> a b"), lambda x, _: tf.cumsum(x, 0)),
    "state": Planted("AssignAddVariableOp", adds_its_own(1), written),
    "strided": Planted("StridedSlice", drops_sums, lambda x, _: x[5]),
    "values": Planted("DenseBincount", drops_sums, counted),
}
