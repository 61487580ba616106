"""Ops with windows whose spatial dims are split, against the plain ops."""

import pytest
import tensorflow as tf

from tests.partitioned import Traced, sweep, was_split
from tests.rules.test_soundness_conv import f, with_gradients
from tfpar.propagation import Anchors, propagate
from tfpar.spec import Mesh, Replicate, Shard

R, B, H, W = Replicate(), Shard(0), Shard(1), Shard(2)
MESHES = {1: Mesh.of([2]), 2: Mesh.of([2, 2])}
FOUR = Mesh.of([4])

LAYOUTS = ((H,), (W,), (H, H), (W, H), (B, H), (W, B))
"""How images lie: split along a spatial dim, along it twice, along both, and with the batch."""


def run_all(function, args, layouts=LAYOUTS, atol=2e-4, rest=None):
    """The checked runs of `function` with its first argument laid as each of `layouts`.

    Args:
        rest: how the other arguments lie; whole if it is not given.
    """
    traced = Traced.of(function, args)
    runs = []
    for spec in layouts:
        others = rest or [(R,) * len(spec)] * (len(args) - 1)
        runs.append(traced.check([spec, *others], MESHES[len(spec)], rtol=2e-4, atol=atol))
    return runs


def moved(function, args, spec):
    """(kind, bytes) of what crosses ranks where nothing asks how the outputs lie."""
    traced, mesh = Traced.of(function, args), MESHES[len(spec)]
    others = {f"arg{i}:0": (R,) * len(spec) for i in range(1, len(args))}
    partitioned = propagate(
        traced.prepared,
        mesh,
        Anchors(inputs=[(R,) * len(spec)] * len(args), tensors={"arg0:0": spec, **others}),
    )
    return [(kind, size) for kind, _, size in partitioned.collectives()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "padding, size, stride, dilation",
    [
        ("SAME", 3, 1, 1),
        ("SAME", 2, 1, 1),
        ("SAME", 5, 1, 1),
        ("SAME", 3, 2, 1),
        ("SAME", 1, 1, 1),
        ("SAME", 3, 1, 2),
        ("VALID", 2, 2, 1),
    ],
)
def test_conv2d(padding, size, stride, dilation):
    runs = run_all(
        with_gradients(lambda x, k: tf.nn.conv2d(x, k, stride, padding, dilations=dilation)),
        [f(2, 16, 16, 3), f(size, size, 3, 4)],
        atol=2e-3,
    )
    for op_type in ("Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter"):
        assert was_split(runs, op_type, "h") and was_split(runs, op_type, "w"), op_type


def test_windows_that_skip_rows():
    """TensorFlow's gradient of such a filter crashes now and then on a CPU, so it is left out."""
    kernel = f(1, 1, 3, 4)
    runs = run_all(with_gradients(lambda x: tf.nn.conv2d(x, kernel, 2, "VALID")), [f(2, 16, 16, 3)])
    for op_type in ("Conv2D", "Conv2DBackpropInput"):
        assert was_split(runs, op_type, "h") and was_split(runs, op_type, "w"), op_type


def test_max_pool():
    def pools(x):
        return [tf.nn.max_pool2d(x, 3, 2, "SAME"), tf.nn.max_pool2d(x, 2, 2, "SAME")]

    def function(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            made = pools(x)
            loss = sum(tf.reduce_sum(y * y) for y in made)
        return [*made, tape.gradient(loss, x), *pools(-tf.abs(x))]

    runs = run_all(function, [f(2, 16, 16, 3)])
    for op_type in ("MaxPool", "MaxPoolGrad"):
        assert was_split(runs, op_type, "h") and was_split(runs, op_type, "w"), op_type


def test_with_channels_and_partial_sums():
    runs = sweep(
        with_gradients(lambda x, k: tf.nn.conv2d(x, k, 1, "SAME")),
        [f(4, 8, 8, 4), f(3, 3, 4, 6)],
        trials=8,
        seed=3,
        atol=2e-3,
        meshes=[MESHES[2]],
    )
    for op_type in ("Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter"):
        assert all(was_split(runs, op_type, k) for k in "bhwio"), op_type


def test_four_parts():
    function = with_gradients(lambda x, k: tf.nn.conv2d(x, k, 2, "SAME"))
    traced = Traced.of(function, [f(2, 16, 6, 3), f(5, 3, 3, 4)])
    run = traced.check([(H,), (R,)], Mesh.of([4]), rtol=2e-4, atol=2e-3)
    assert was_split([run], "Conv2DBackpropInput", "h")


def test_only_edges_are_gathered():
    """Of 2 images of 8 columns and 3 channels: 4 blocks with a row for each neighbour; on two axes
    each rank has half of the images, or the columns, of that."""
    function = with_gradients(lambda x, k: tf.nn.conv2d(x, k, 1, "SAME"))
    args = [f(2, 16, 8, 3), f(3, 3, 3, 4)]
    edges = 2 * 2 * (2 * 8 * 3) * 4
    filters = 3 * 3 * 3 * 4 * 4
    assert sorted(moved(function, args, (H,))) == [("all_gather", edges)] * 3 + [
        ("all_reduce", filters)
    ]
    assert sorted(moved(function, args, (B, H))) == [("all_gather", edges // 2)] * 3 + [
        ("all_reduce", filters)
    ]


def test_channels_first():
    """Kernels for this format are rare on CPU: the forward op alone."""
    runs = run_all(
        lambda x, k: tf.nn.conv2d(x, k, 1, "SAME", data_format="NCHW"),
        [f(2, 3, 8, 8), f(3, 3, 3, 4)],
        [(Shard(2),), (Shard(3), Shard(2))],
    )
    assert was_split(runs, "Conv2D", "h") and was_split(runs, "Conv2D", "w")


def test_generic_conv_and_one_dim():
    runs = run_all(
        lambda x, k: tf.raw_ops.Conv(input=x, filter=k, strides=[1] * 4, padding="SAME"),
        [f(2, 8, 8, 3), f(3, 3, 3, 4)],
    )
    assert was_split(runs, "Conv", "h") and was_split(runs, "Conv", "w")
    runs = run_all(
        with_gradients(lambda x, k: tf.nn.conv1d(x, k, 1, "SAME", dilations=2)),
        [f(2, 16, 3), f(3, 3, 4)],
        [(H,), (H, H), (B, H)],
    )
    for op_type in ("Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter"):
        assert was_split(runs, op_type, "w"), op_type


@pytest.mark.slow
@pytest.mark.parametrize("stride", [1, 2])
def test_depthwise(stride):
    runs = run_all(
        with_gradients(lambda x, k: tf.nn.depthwise_conv2d(x, k, [1, stride, stride, 1], "SAME")),
        [f(2, 8, 8, 3), f(3, 3, 3, 2)],
        atol=2e-3,
    )
    for op_type in ("", "BackpropInput", "BackpropFilter"):
        for factor in "hw":
            assert was_split(runs, "DepthwiseConv2dNative" + op_type, factor), (op_type, factor)


@pytest.mark.parametrize("size", [2, 3])
def test_transposed(size):
    runs = run_all(
        with_gradients(lambda x, k: tf.nn.conv2d_transpose(x, k, [2, 16, 16, 4], 2, "SAME")),
        [f(2, 8, 8, 3), f(size, size, 4, 3)],
        atol=2e-3,
    )
    for op_type in ("Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter"):
        assert was_split(runs, op_type, "h") and was_split(runs, op_type, "w"), op_type


@pytest.mark.slow
def test_volumes():
    """Ops on volumes know no explicit padding: that of the other dims is their decomposition's."""

    def function(x, k):
        return tf.nn.max_pool3d(tf.nn.conv3d(x, k, [1, 1, 2, 1, 1], "SAME"), 3, [1, 2, 1], "SAME")

    layouts = [(H,), (Shard(3), H), (Shard(3), W), (B, W)]
    runs = run_all(
        with_gradients(function), [f(2, 4, 8, 4, 2), f(3, 3, 3, 2, 3)], layouts, atol=2e-3
    )
    for op_type in ("Conv3D", "Conv3DBackpropInputV2", "Conv3DBackpropFilterV2", "MaxPool3D"):
        assert all(was_split(runs, op_type, factor) for factor in "dhw"), op_type


def test_pools_without_halos():
    window = {"ksize": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "padding": "SAME"}
    args = [f(2, 8, 8, 3)]
    runs = run_all(with_gradients(lambda x: tf.raw_ops.AvgPool(value=x, **window)), args)
    runs += run_all(lambda x: tf.raw_ops.MaxPoolV2(input=x, **window), args)
    for op_type in ("AvgPool", "AvgPoolGrad", "MaxPoolV2"):
        assert was_split(runs, op_type, "h") and was_split(runs, op_type, "w"), op_type
    window["ksize"] = [1, 3, 3, 1]
    runs = run_all(lambda x: tf.raw_ops.MaxPoolV2(input=x, **window), args)
    assert not was_split(runs, "MaxPoolV2", "h")


def test_mean_pools_that_overlap_stay_whole():
    runs = run_all(with_gradients(lambda x: tf.nn.avg_pool2d(x, 3, 2, "SAME")), [f(2, 8, 8, 3)])
    assert not was_split(runs, "AvgPool", "h") and not was_split(runs, "AvgPoolGrad", "h")


# --- what lies between them -----------------------------------------------------------------


def test_nothing_is_gathered_between_convolutions():
    """Bias, activation, sum, concat, blocks of pixels, the next dense layer's mean."""

    def function(x, bias):
        y = tf.nn.relu(tf.nn.bias_add(x, bias))
        y = tf.concat([y, x + y], -1)
        y = tf.image.resize(tf.nn.space_to_depth(y, 2), [8, 8], "nearest")
        y = tf.repeat(tf.repeat(y, 2, axis=1), 2, axis=2)
        y = tf.nn.depth_to_space(y, 2)
        return y * tf.reduce_mean(y, [1, 2], keepdims=True)

    args = [f(2, 8, 8, 2), f(2)]
    runs = run_all(with_gradients(function), args, atol=2e-2)
    for name in ("SpaceToDepth", "DepthToSpace", "ResizeNearestNeighbor", "Tile"):
        assert any(was_split(runs, name, factor) for factor in ("h", "f1", "d1")), name
    for spec in LAYOUTS:
        assert {kind for kind, _ in moved(with_gradients(function), args, spec)} <= {"all_reduce"}


@pytest.mark.parametrize("is_training", [True, False])
def test_batch_norm(is_training):
    def function(x, scale, offset, mean, variance):
        statistics = {} if is_training else {"mean": mean, "variance": variance}
        return tf.compat.v1.nn.fused_batch_norm(
            x, scale, offset, is_training=is_training, **statistics
        )[0]

    args = [1 + f(2, 8, 8, 3), *(1 + f(3) ** 2 for _ in range(4))]

    def both(x, scale, *rest):
        with tf.GradientTape() as tape:
            tape.watch([x, scale])
            y = function(x, scale, *rest)
            loss = tf.reduce_sum(y * y * x)
        return [y, *tape.gradient(loss, [x, scale])]

    runs = run_all(both, args, atol=2e-3)
    for op_type in ("FusedBatchNormV3", "FusedBatchNormGradV3"):
        assert was_split(runs, op_type, "h") and was_split(runs, op_type, "w"), op_type
    for spec in LAYOUTS:
        assert {kind for kind, _ in moved(both, args, spec)} <= {"all_reduce"}


@pytest.mark.parametrize("times", [2, 3])
@pytest.mark.parametrize("centers", [True, False])
def test_nearest_neighbours(times, centers):
    size = [4 * times, 6 * times]

    def function(x):
        return tf.raw_ops.ResizeNearestNeighbor(images=x, size=size, half_pixel_centers=centers)

    runs = run_all(with_gradients(function), [f(2, 4, 6, 3)])
    exact = centers or times == 2
    for op_type in ("ResizeNearestNeighbor", "ResizeNearestNeighborGrad"):
        assert was_split(runs, op_type, "h") is exact and was_split(runs, op_type, "w") is exact


# --- which windows line up ----------------------------------------------------------------


def spatial_splits(function, *args):
    """The factors that may split in the first op with windows, with the shortest block of each."""
    graph = Traced.of(function, args).prepared
    rule = next(r for op, r in graph.rules.items() if op.type.startswith(("Conv", "Max", "Avg")))
    return {
        rule.names[i]: rule.blocks.get(i) for i in rule.splittable if rule.names[i] in ("h", "w")
    }


@pytest.mark.parametrize(
    "size, stride, padding, shortest",
    [
        (3, 1, "SAME", 2),
        (5, 1, "SAME", 4),
        (3, 2, "SAME", 1),
        (7, 2, "SAME", 3),
        (1, 1, "SAME", None),
        (2, 2, "VALID", None),
        (1, 2, "VALID", None),
        (2, 2, "SAME", None),
    ],
)
def test_windows_that_line_up(size, stride, padding, shortest):
    found = spatial_splits(
        lambda x, k: tf.nn.conv2d(x, k, stride, padding), f(1, 8, 12, 2), f(size, size, 2, 3)
    )
    assert found == {"h": shortest, "w": shortest}


@pytest.mark.parametrize(
    "length, size, stride, padding",
    [
        (8, 3, 1, "VALID"),
        (9, 2, 2, "VALID"),
        (7, 3, 2, "SAME"),
        (8, 3, 3, "SAME"),
        (4, 4, 4, "SAME"),
    ],
)
def test_windows_that_do_not_line_up_leave_their_dim_whole(length, size, stride, padding):
    function = with_gradients(lambda x, k: tf.nn.conv2d(x, k, stride, padding))
    args = [f(2, length, 6, 2), f(size, 1, 2, 3)]
    assert "h" not in spatial_splits(function, *args)
    runs = run_all(function, args, [(H,)])
    assert not was_split(runs, "Conv2D", "h")


def test_each_dim_for_itself():
    found = spatial_splits(
        lambda x, k: tf.nn.conv2d(x, k, [1, 2, 1, 1], [[0, 0], [0, 0], [2, 0], [0, 0]]),
        f(1, 7, 12, 2),
        f(2, 3, 2, 3),
    )
    assert found == {"w": 2}


@pytest.mark.parametrize("length, parts", [(6, 4), (10, 4), (4, 4), (2, 2)])
def test_blocks_that_are_uneven_or_too_short_are_not_cut(length, parts):
    """Windows of five reach two rows each way: a block has to have four."""
    function = with_gradients(lambda x, k: tf.nn.conv2d(x, k, 1, "SAME"))
    traced = Traced.of(function, [f(2, length, 5, 2), f(5, 5, 2, 3)])
    run = traced.check([(H,), (R,)], Mesh.of([parts]), rtol=2e-4, atol=2e-4)
    assert not was_split([run], "Conv2D", "h")


def test_a_second_axis_that_would_cut_too_short_leaves_the_first():
    function = with_gradients(lambda x, k: tf.nn.conv2d(x, k, 1, "SAME"))
    runs = run_all(function, [f(2, 8, 5, 2), f(5, 5, 2, 3)], [(H, H)])
    (decision,) = runs[0].decisions("Conv2D")
    assert [split for split, _ in decision.strategy.splits] == [1, -1]
