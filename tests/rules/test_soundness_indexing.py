"""Gathers, scatters, segment reductions and kin against the plain ops."""

import numpy as np
import pytest
import tensorflow as tf

from tests.partitioned import check, sweep, was_split
from tests.rules.test_soundness_layout import f, with_gradient
from tfpar.spec import Mesh, Replicate, Shard

rng = np.random.default_rng(0)


def ids(high, *shape):
    return rng.integers(0, high, shape).astype("int32")


def with_gradients(function):
    """`function` of floats and indices, and the gradients of its float arguments."""

    def both(*args):
        floats = [a for a in args if a.dtype.is_floating]
        with tf.GradientTape() as tape:
            tape.watch(floats)
            out = function(*args)
            loss = tf.reduce_sum(tf.sin(out) * out)
        grads = [tf.convert_to_tensor(g) for g in tape.gradient(loss, floats)]
        return [out, *grads]

    return both


def test_embedding_and_its_gradient():
    """A vocabulary that does not divide: each rank looks up its own rows."""
    runs = sweep(
        with_gradients(lambda table, i: tf.gather(table, i)), [f(7, 4), ids(7, 5, 3)], trials=6
    )
    assert all(was_split(runs, "GatherV2", k) for k in ("v", "q1", "i0", "i1"))
    assert all(was_split(runs, "UnsortedSegmentSum", k) for k in ("i0", "r1"))


@pytest.mark.slow
@pytest.mark.parametrize("axis,batch_dims", [(1, 0), (2, 0), (1, 1), (2, 1), (-1, 0)])
def test_gather_along_any_axis(axis, batch_dims):
    index = ids(4, 3, 5) if batch_dims else ids(4, 5)
    runs = sweep(
        with_gradients(lambda x, i: tf.gather(x, i, axis=axis, batch_dims=batch_dims)),
        [f(3, 4, 5), index],
        trials=4,
    )
    assert was_split(runs, "GatherV2", "v")
    assert was_split(runs, "GatherV2", "b0" if batch_dims else "p0")
    assert was_split(runs, "GatherV2", "i1" if batch_dims else "i0")


def test_gather_of_integers_and_booleans():
    runs = sweep(
        lambda x, i: (tf.gather(tf.cast(x, tf.int32), i), tf.gather(x > 0, i)),
        [f(7, 4), ids(7, 5)],
        trials=4,
    )
    assert was_split(runs, "GatherV2", "v")


def test_padded_indices_never_reach_the_kernel():
    """What the padding of the indices holds after arithmetic would be out of range."""
    index = np.array([-3, -2, -1, -4, -1], "int32")
    for mesh in (Mesh.of([2]), Mesh.of([3])):
        spec = (Shard(0),)
        check(lambda x, i: tf.gather(x, i + 4), [f(4, 2), index], [(Replicate(),), spec], mesh)
        check(
            lambda x, i: tf.math.unsorted_segment_sum(x, i + 4, 4),
            [f(5, 2), index],
            [spec, spec],
            mesh,
        )
        check(
            lambda x, i: tf.scatter_nd((i + 4)[:, None], x, [4, 2]),
            [f(5, 2), index],
            [spec, spec],
            mesh,
        )


def test_sequence_sharded_ids_stay_in_place():
    """Ids flattened with their sequence dim split: a strided shard of the rows."""
    mesh = Mesh.of([2, 2])
    result = check(
        with_gradients(lambda table, i: tf.gather(table, i)),
        [f(7, 4), ids(7, 4, 6)],
        [(Replicate(),) * 2, (Shard(0), Shard(1))],
        mesh,
    )
    assert was_split([result], "UnsortedSegmentSum", "i0")


@pytest.mark.slow
def test_gather_nd():
    index = np.stack([ids(4, 5, 3), ids(5, 5, 3)], -1)
    runs = sweep(with_gradients(tf.gather_nd), [f(4, 5, 3), index], trials=6)
    assert all(was_split(runs, "GatherNd", k) for k in ("v0", "v1", "q2", "i0", "i1"))
    assert all(was_split(runs, "ScatterNd", k) for k in ("i0", "r2"))


def test_scatter_nd():
    runs = sweep(
        with_gradients(lambda u, i: tf.scatter_nd(i, u, [7, 4])), [f(5, 4), ids(7, 5, 1)], trials=5
    )
    assert all(was_split(runs, "ScatterNd", k) for k in ("i0", "r1"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["add", "sub", "update", "max", "min"])
def test_tensor_scatter(kind):
    op = getattr(tf, f"tensor_scatter_nd_{kind}")
    index = np.array([[6, 1], [0, 3], [2, 2], [5, 0]], "int32")
    runs = sweep(
        with_gradients(lambda x, u, i: op(x, i, u)), [f(7, 4, 3), f(4, 3), index], trials=5
    )
    name = f"TensorScatter{kind.capitalize()}"
    assert all(was_split(runs, name, k) for k in ("v0", "v1", "r2"))


def test_non_aliasing_scatter():
    def function(x, u):
        return tf.raw_ops.ScatterNdNonAliasingAdd(input=x, indices=[[6], [0], [2]], updates=u)

    runs = sweep(function, [f(7, 4), f(3, 4)], trials=3)
    assert all(was_split(runs, "ScatterNdNonAliasingAdd", k) for k in ("v0", "r1"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sum", "max", "min", "prod", "mean"])
def test_unsorted_segments(kind):
    op = getattr(tf.math, f"unsorted_segment_{kind}")
    runs = sweep(lambda x, i: op(x, i, 4), [f(5, 2, 3), ids(5, 5, 2) - 1], trials=6)
    name = f"UnsortedSegment{'Sum' if kind == 'mean' else kind.capitalize()}"
    assert all(was_split(runs, name, k) for k in ("i0", "i1", "r2"))
    # A single segment, an identity that is no valid id.
    sweep(lambda x, i: op(x, i, 1), [f(5, 3), ids(1, 5)], trials=2)


@pytest.mark.parametrize(("segments", "kinds"), [(500, {"all_gather"}), (8, {"all_reduce"})])
def test_rows_are_gathered_where_they_are_less_than_the_sums(segments, kinds):
    """The gradient of an embedding under data parallelism: the rows of a batch, or the table."""
    rows = np.arange(64, dtype="int32") % segments
    run = check(
        lambda x, i: tf.math.unsorted_segment_sum(x, i, segments),
        [f(64, 4), rows],
        [(Shard(0),), (Shard(0),)],
        Mesh.of([4]),
    )
    assert {kind for kind, *_ in run.partitioned.collectives()} == kinds


def test_rows_are_not_gathered_where_the_sums_are_reduced_anyway():
    """The gradient of a table that is also the classifier's."""
    rows = np.arange(64, dtype="int32")
    run = check(
        lambda x, i, h: tf.math.unsorted_segment_sum(x, i, 500) + tf.matmul(h, x, transpose_a=True),
        [f(64, 4), rows, f(64, 500)],
        [(Shard(0),)] * 3,
        Mesh.of([4]),
    )
    ((kind, *_),) = run.partitioned.collectives()
    assert kind == "all_reduce"


def test_pooled_lookups():
    rows, segments = [0, 3, 4, 1], [0, 0, 1, 2]

    def function(x):
        pooled = (tf.sparse.segment_sum, tf.sparse.segment_mean, tf.sparse.segment_sqrt_n)
        return [
            *(pool(x, rows, segments, num_segments=3) for pool in pooled),
            *(
                getattr(tf.raw_ops, f"SparseSegment{kind}Grad")(
                    grad=x[:3], indices=rows, segment_ids=segments, output_dim0=5
                )
                for kind in ("Sum", "Mean", "SqrtN")
            ),
        ]

    runs = sweep(function, [f(5, 4)], trials=4)
    for kind in ("Sum", "Mean", "SqrtN"):
        assert was_split(runs, f"SparseSegment{kind}WithNumSegments", "r1")
        assert was_split(runs, f"SparseSegment{kind}Grad", "r1")
    # How many segments there are is not known: whole.
    sweep(lambda x: tf.math.segment_sum(x, [0, 0, 1, 2, 2]), [f(5, 4)], trials=2)


def test_one_hot():
    runs = sweep(
        lambda i: (tf.one_hot(i, 5), tf.one_hot(i, 4, on_value=2.0, off_value=-1.0, axis=1)),
        [ids(5, 5, 3)],
        trials=4,
    )
    assert was_split(runs, "OneHot", "d0") and was_split(runs, "OneHot", "d1")


@pytest.mark.slow
def test_diagonals_and_bands():
    def function(x):
        return (
            tf.linalg.band_part(x, 1, 0),
            tf.linalg.diag(x),
            tf.linalg.diag_part(x),
            tf.linalg.diag_part(x, k=(-1, 1)),
            tf.linalg.set_diag(x, x[..., 0]),
            tf.linalg.diag(x, k=(0, 3)),
        )

    runs = sweep(with_gradient(function), [f(5, 4, 4)], trials=4)
    assert was_split(runs, "MatrixBandPart", "_0")
    for op_type in ("MatrixDiagV3", "MatrixDiagPartV3", "MatrixSetDiagV3"):
        assert was_split(runs, op_type, "b0"), op_type


def test_diagonals_of_older_graphs():
    raw = tf.raw_ops

    def function(x):
        flat = tf.reshape(x, [-1])
        return (
            raw.MatrixDiag(diagonal=x),
            raw.MatrixDiagPart(input=x),
            raw.MatrixDiagV2(diagonal=x, k=0, num_rows=-1, num_cols=-1, padding_value=1.0),
            raw.MatrixDiagPartV2(input=x, k=0, padding_value=0.0),
            raw.MatrixSetDiag(input=x, diagonal=x[..., 0]),
            raw.MatrixSetDiagV2(input=x, diagonal=x[..., 0], k=0),
            raw.DiagPart(input=raw.Diag(diagonal=flat)),
        )

    runs = sweep(function, [f(5, 3, 3)], trials=3)
    for name in ("Diag", "DiagPart", "SetDiag"):
        assert was_split(runs, f"Matrix{name}", "b0") and was_split(runs, f"Matrix{name}V2", "b0")


def test_search_counts_and_buckets():
    edges = np.sort(f(5, 4), -1)
    runs = sweep(
        lambda e, x: (tf.searchsorted(e, x), tf.searchsorted(e, x, side="right")),
        [edges, f(5, 3)],
        trials=3,
        partial=False,
    )
    assert was_split(runs, "LowerBound", "b") and was_split(runs, "UpperBound", "m")
    runs = sweep(
        lambda i: (
            tf.raw_ops.DenseBincount(input=i, size=4, weights=tf.constant([], tf.float32)),
            tf.raw_ops.DenseBincount(
                input=tf.reshape(i, [-1]), size=4, weights=tf.constant([], tf.float32)
            ),
            tf.raw_ops.Bucketize(input=i, boundaries=[1.0, 3.0]),
        ),
        [ids(6, 5, 3)],
        trials=4,
    )
    assert all(was_split(runs, "DenseBincount", k) for k in ("n", "b"))
    assert was_split(runs, "Bucketize", "_0")


def test_dynamic_stitch():
    def function(x, y):
        rows = [[0, 3], [[1], [2]]]
        return (
            tf.dynamic_stitch(rows, [x, y]),
            tf.raw_ops.ParallelDynamicStitch(indices=rows, data=[x, y]),
        )

    runs = sweep(function, [f(2, 5), f(2, 1, 5)], trials=4)
    assert was_split(runs, "DynamicStitch", "r1")
    assert was_split(runs, "ParallelDynamicStitch", "r1")


def test_ops_of_unknown_size_run_whole():
    sweep(
        lambda x: (
            tf.where(x > 0),
            tf.unique(tf.reshape(tf.round(x), [-1]))[0],
            tf.boolean_mask(x, x[:, 0] > 0),
        ),
        [f(5, 3)],
        trials=3,
    )


@pytest.mark.slow
def test_what_an_op_makes_is_split_as_its_readers_want():
    """Segments, classes, copies: a rank makes the part that it adds to what it holds."""
    index = ids(7, 5)

    def function(table, rows):
        return (
            table + tf.math.unsorted_segment_sum(rows, index, 7),
            table + tf.scatter_nd(index[:, None], rows, [7, 4]),
            table + tf.transpose(tf.one_hot([0, 3, 6, 2], 7)),
            table * tf.fill([7, 4], rows[0, 0]),
            table - tf.broadcast_to(rows[:1], [7, 4]),
            table - tf.tile(rows[:1], [7, 1]),
        )

    runs = sweep(function, [f(7, 4), f(5, 4)], trials=4)
    for op_type, factor in {
        "UnsortedSegmentSum": "s",
        "ScatterNd": "v0",
        "OneHot": "depth",
        "Fill": "_1",
        "BroadcastTo": "_1",
        "Tile": "r0",
    }.items():
        assert was_split(runs, op_type, factor), op_type
    for mesh in (Mesh.of([2]), Mesh.of([3])):
        result = check(function, [f(7, 4), f(5, 4)], [(Shard(0),), (Replicate(),)], mesh)
        kinds = [kind for kind, _, _ in result.partitioned.collectives()]
        assert kinds == ["all_gather"] * 6  # the test's own gathers of the results
