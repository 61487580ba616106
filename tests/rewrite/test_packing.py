"""Collectives of one group travel in buckets; what comes of them is what came of each."""

from __future__ import annotations

import collections

import keras
import numpy as np
import pytest

import tfpar as tap
from tests.equivalence import assert_equivalent, train
from tests.partitioned import OP_TYPES
from tests.rewrite.test_early_collectives import Backward
from tfpar.compile.local.packing import pack_collectives, payload
from tfpar.compile.local.reshard import CHUNK, COLLECTIVE_TYPES
from tfpar.ir import DType, Graph, GraphBuilder, Op, Tensor

AXES = (0,)


class Forward(Backward):
    """Products of gathered weights, on two ranks."""

    def gathered(self, name: str, rows: int = 2, columns: int = 4, **attrs) -> Tensor:
        attrs = {"axes": AXES, "dims": (0,), **attrs}
        weight = self.input(rows, columns)
        made = self.build.emit(
            "AllGather", (weight,), [((2 * rows, columns), "float32")], attrs, name=name
        )
        return made.outputs[0]

    def scattered(self, name: str, x: Tensor, dim: int) -> Tensor:
        shape = list(x.shape)
        shape[dim] //= 2
        attrs = {"axes": AXES, "dims": (dim,), "reduction": "sum"}
        made = self.build.emit("ReduceScatter", (x,), [(tuple(shape), "float32")], attrs, name=name)
        return made.outputs[0]

    def packed(self, bucket_bytes: int = 2**20) -> list[Op]:
        graph = pack_collectives(self.build.graph, bucket_bytes)
        return [op for op in graph.ops if op.type in COLLECTIVE_TYPES]


# --- which travel together --------------------------------------------------------------


def test_gradients_are_scattered_together_whatever_their_dims():
    backward = Forward()
    for name, dim in (("one", 0), ("other", 1), ("third", 0)):
        backward.update(backward.scattered(name, backward.input(4, 8), dim))
    (op,) = backward.packed()
    assert op.type == "ReduceScatter" and op.attrs["dims"] == (0, 1, 0)
    assert [t.shape for t in op.outputs] == [(2, 8), (4, 4), (2, 8)]
    assert all(effect.inputs[0].op is op for effect in backward.build.graph.effects)


def test_what_one_layer_reads_is_gathered_together_and_the_next_layers_is_not():
    """Weights are ready from the beginning on: they are gathered when they are needed."""
    forward = Forward()
    x = forward.input(8, 4)
    weights = [forward.gathered(name) for name in ("query", "key", "value", "out")]
    viewed = [forward.build.reshape(w, (4, 4)) for w in weights]
    query, key, value = (forward.product("product", x, w, 8, 4) for w in viewed[:3])
    mixed = forward.build.binary("AddV2", forward.build.binary("AddV2", query, key), value)
    forward.update(forward.product("last", mixed, viewed[3], 8, 4))
    assert sorted(len(op.inputs) for op in forward.packed()) == [1, 3]


def test_updated_weights_are_gathered_together():
    update = Forward()
    for name in ("one", "other"):
        update.update(update.gathered(name))
    (op,) = update.packed()
    assert len(op.inputs) == 2


def test_buckets_are_bounded():
    update = Forward()
    for i in range(5):
        update.update(update.gathered(f"weight{i}"))
    each = 4 * 4 * 4
    ops = update.packed(bucket_bytes=2 * each)
    assert sorted(map(payload, ops)) == [each, 2 * each, 2 * each]


def test_chunks_and_kinds_stay_apart():
    mixed = Forward()
    for chunk in range(2):
        mixed.update(mixed.gathered(f"chunk{chunk}", **{CHUNK: chunk}))
    mixed.update(mixed.scattered("gradient", mixed.input(4, 8), 0))
    assert [len(op.inputs) for op in mixed.packed()] == [1, 1, 1]


def test_a_scatter_that_needs_another_is_in_no_bucket_with_it():
    build = GraphBuilder(Graph())
    backward = Forward()
    backward.build = build
    first = backward.scattered("first", backward.input(8, 8), 0)
    attrs = {"T": DType("float32")}
    grown = build.emit("MatMul", (first, first), [((8, 8), "float32")], attrs).outputs[0]
    backward.update(backward.scattered("second", grown, 0))
    assert len(backward.packed()) == 2


# --- what comes of them -----------------------------------------------------------------


def network(layers: int = 5) -> keras.Model:
    """Widths that four ranks divide, and some that they do not."""
    x = inputs = keras.Input((6,))
    for i in range(layers):
        x = keras.layers.Dense((8, 13)[i % 2], "tanh", name=f"d{i}")(x)
    model = keras.Model(inputs, x)
    model.compile("adam", "mse", jit_compile=False)
    return model


def numbers(width: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return tuple(rng.normal(size=(16, n)).astype("float32") for n in (6, width))


SLOTS = [
    tap.batch("data"),
    tap.shard(r"adam.*d[024]_kernel_(momentum|velocity)", dim=1, axis="data"),
    tap.shard(r"adam.*d[13]_kernel_(momentum|velocity)", dim=0, axis="data"),
    tap.shard(r"adam.*d[13]_bias_(momentum|velocity)", dim=0, axis="data"),
]
"""Of other dims, and of sizes that four ranks do not divide: 13."""


@pytest.fixture(scope="module")
def zero():
    """ZeRO-1 on four ranks, beside plain Keras."""
    return assert_equivalent(network, numbers(8), {"data": 4}, SLOTS)[0]


def sent(trained) -> tuple[collections.Counter, collections.Counter]:
    """(number, bytes) of emitted collectives by kind."""
    count, size = collections.Counter(), collections.Counter()
    for op in trained.executable().local.graph.ops:
        if op.type in COLLECTIVE_TYPES:
            count[op.type] += 1
            size[op.type] += payload(op)
    return count, size


@pytest.mark.slow
def test_zero_scatters_and_gathers_once(zero):
    kinds = [kind for kind, *_ in zero.collectives()]
    assert kinds.count("reduce_scatter") == 5 and kinds.count("all_gather") == 7
    count, _ = sent(zero)
    assert count["ReduceScatter"] == count["AllGather"] == 1


def test_packing_moves_as_many_bytes(zero):
    predicted = collections.Counter()
    for kind, _, num_bytes in zero.collectives():
        predicted[OP_TYPES[kind]] += num_bytes
    assert sent(zero)[1] == predicted


def test_small_buckets_compute_the_same_to_the_bit(zero):
    options = {"bucket_bytes": 1}
    alone = train(
        network, numbers(8), mesh={"data": 4}, constraints=SLOTS, start=zero.start, options=options
    )
    assert sent(alone)[0]["ReduceScatter"] == 5
    for one, other in zip(zero.weights, alone.weights, strict=True):
        np.testing.assert_array_equal(one, other)
