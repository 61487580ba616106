"""Programs in chunks: what runs once, what once a chunk, and in which order."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from benchmarks.models import SMALL
from tests.partitioned import Traced, devices
from tests.planning.problems import Captured, partition
from tfpar.compile.local.chunks import (
    build_chunked_program,
    chunked_anchors,
    split_batch,
    with_chunks,
)
from tfpar.compile.local.local_graph import LocalProgram
from tfpar.compile.local.packing import pack_collectives
from tfpar.compile.local.programs import ProgramSet
from tfpar.ir import Graph, Op, sort_topologically
from tfpar.planning import step_anchors
from tfpar.planning.intra_op import RhinoPlanner
from tfpar.propagation import WHOLE, Anchors, propagate
from tfpar.spec import Mesh, Replicate, Shard, replicated_spec
from tfpar.tf.runtime import InProcessProgram

MODEL = Mesh.of({"model": 2})
BOTH = Mesh.of([2, 2])
rng = np.random.default_rng(0)


def numbers(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype("float32")


def chunked(function, args, weights, mesh: Mesh, chunks: int, batch_axes=()) -> LocalProgram:
    """The program of `function` with its first argument in chunks; checked by running it.

    Args:
        weights: the specs of the other arguments.
    """
    traced = Traced.of(function, args)
    whole = replicated_spec(mesh.num_axes)
    fed = tuple(Shard(0) if a in batch_axes else Replicate() for a in range(mesh.num_axes))
    graph = traced.prepared.graph
    anchors = Anchors(
        inputs=[fed] + [whole] * (len(args) - 1),
        tensors={f"arg{i}:0": spec for i, spec in enumerate(weights, 1)},
        outputs=[whole] * len(graph.outputs),
    )
    partitioned = propagate(traced.prepared, mesh, anchors)
    laid = split_batch(partitioned, anchors, {graph.inputs[0]}, chunks)
    program = build_chunked_program(laid)
    assert program.mesh == mesh
    pack_collectives(program.graph)
    results = InProcessProgram(ProgramSet.of(program), devices(mesh))(
        [tf.constant(a) for a in traced.args], []
    )
    for got, want in zip(results, traced.expected, strict=True):
        np.testing.assert_allclose(got.numpy(), want, 1e-4, 1e-5)
    return program


def ops(graph: Graph, *types: str) -> list[Op]:
    return [op for op in graph.ops if op.type in types]


def two_layers(x, w, v):
    return tf.tanh(tf.tanh(x @ w) @ v)


WEIGHTS = [numbers(6, 10), numbers(10, 4)]
COLUMNS_AND_ROWS = [(Shard(1),), (Shard(0),)]


@pytest.mark.parametrize(("size", "chunks"), [(8, 2), (8, 4), (7, 2), (3, 4)])
def test_each_chunk_has_its_own_all_reduce_of_its_own_part(size, chunks):
    args = [numbers(size, 6), *WEIGHTS]
    program = chunked(two_layers, args, COLUMNS_AND_ROWS, MODEL, chunks)
    sums = ops(program.graph, "AllReduce")
    rows = -(-size // chunks)
    assert [op.inputs[0].shape for op in sums] == [(rows, 4)] * chunks
    assert sorted(op.attrs["chunk"] for op in sums) == list(range(chunks)), "and none is packed"
    assert len({op.name for op in sums}) == chunks


def test_what_chunks_share_runs_once():
    def scaled(x, w, v):
        return two_layers(x, tf.tanh(w), v)

    args = [numbers(8, 6), *WEIGHTS]
    program = chunked(scaled, args, COLUMNS_AND_ROWS, MODEL, 2)
    shapes = [op.outputs[0].shape for op in ops(program.graph, "Tanh")]
    assert shapes.count((6, 5)) == 1, "of the weight"
    assert shapes.count((4, 5)) == shapes.count((4, 4)) == 2, "of the chunks"


def test_sums_over_the_batch_are_added_up_within_the_rank_and_sent_once():
    def mean(x, w, v):
        return tf.reduce_mean(two_layers(x, w, v), 0)

    args = [numbers(10, 6), *WEIGHTS]
    kernels = [(Replicate(), Shard(1)), (Replicate(), Shard(0))]
    program = chunked(mean, args, kernels, BOTH, 2, batch_axes=[0])
    axes = [op.attrs["axes"] for op in ops(program.graph, "AllReduce")]
    assert sorted(axes) == [(0,), (1,), (1,)]
    assert len(ops(program.graph, "AddN")) == 1


def test_gathers_along_the_batch_are_joined_within_the_rank_and_sent_once():
    program = chunked(lambda x: tf.reverse(x, [0]) * 2.0, [numbers(8, 6)], [], MODEL, 2, [0])
    assert len(ops(program.graph, "AllGather")) == 1


def test_largest_and_smallest_are_those_of_all_chunks():
    def extremes(x):
        return tf.reduce_max(x, 0), tf.reduce_min(x), tf.reduce_prod(x, 0), tf.reduce_any(x > 2, 0)

    chunked(extremes, [numbers(10, 6)], [], MODEL, 4, [0])


def test_constants_of_ranks_are_those_of_chunks():
    def numbered(x, w):
        rows = tf.cast(tf.range(9), "float32")[:, None]
        return tf.cumsum(x, 1) * rows, tf.reduce_mean(tf.nn.softmax(x @ w), 0)

    chunked(numbered, [numbers(9, 6), numbers(6, 10)], [(Shard(1),)], MODEL, 2)


def test_draws_are_those_of_the_whole_batch():
    def drawn(x):
        noise = tf.random.stateless_uniform((9, 6), (1, 2))
        return tf.where(noise < 0.5, x, 0.0)

    chunked(drawn, [numbers(9, 6)], [], MODEL, 4, [0])


# --- order ------------------------------------------------------------------------


def before(op: Op) -> set[Op]:
    """Every op that has to run before `op`."""
    found: set[Op] = set()
    stack = [op]
    while stack:
        at = stack.pop()
        for other in (*(t.op for t in at.inputs), *at.control):
            if other not in found:
                found.add(other)
                stack.append(other)
    return found


def four_layers(x, w, v):
    h = tf.nn.relu(two_layers(x, w, v))
    return two_layers(tf.concat([h, h[:, :2]], 1), w, v)


def test_a_chunk_begins_once_the_one_before_it_has_sent_and_not_once_it_has_arrived():
    args = [numbers(8, 6), *WEIGHTS]
    graph = chunked(four_layers, args, COLUMNS_AND_ROWS, MODEL, 2).graph
    products = [op for op in ops(graph, "MatMul") if op.inputs[0].shape == (4, 5)]
    sums = [op for op in ops(graph, "AllReduce")]
    first = [op for op in products if not op.name.endswith("/chunk1")]
    second = [op for op in products if op.name.endswith("/chunk1")]
    assert len(first) == len(second) == 2, "one for each pair of layers"
    for own, other in zip(first, second, strict=True):
        (sent,) = (op for op in sums if op.inputs[0].op is own)
        assert own in before(other), "its sum is in flight while the other is computed"
        assert sent not in before(other)
        opening = [op for op in before(other) if own in op.control]
        assert opening and all(op.name.endswith("/chunk1") for op in opening)


def test_chunks_that_meet_are_in_no_cycle():
    def normalized(x, w, v):
        h = two_layers(x, w, v)
        h = (h - tf.reduce_mean(h, 0)) / tf.math.reduce_std(h, 0)
        return two_layers(tf.concat([h, h[:, :2]], 1), w, v), tf.reduce_sum(h)

    args = [numbers(10, 6), *WEIGHTS]
    graph = chunked(normalized, args, COLUMNS_AND_ROWS, MODEL, 4).graph
    assert all(op not in before(op) for op in graph.ops)
    assert graph.ops == sort_topologically(graph.ops)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wide", "resnet"])
def test_along_an_axis_more_ops_run_as_they_come(name):
    """Chunks are one; along the axes that the plan speaks of nothing changes."""
    sizes = {"classes": 2000}
    problem = Captured.of(lambda: SMALL[name](**sizes), 8).problem([2, 2], "cpu")
    plan = RhinoPlanner().solve(problem)
    before, anchors = partition(problem, plan), step_anchors(plan, problem)
    count = plan.mesh.num_axes
    mesh = with_chunks(plan.mesh, 2)
    after = propagate(before.prepared, mesh, chunked_anchors(before, anchors, problem.step.batched))
    chunked = {op.name: d.strategy for op, d in after.decisions.items()}
    ordinary = [(op, d.strategy) for op, d in before.decisions.items() if not d.bodies]
    assert plan.ops
    for op, strategy in ordinary:
        assert tuple(s[:count] for s in chunked[op.name].in_specs) == strategy.in_specs, op.name
        if op.name in plan.ops:
            kept = tuple(after.specs[t][:count] for t in op.outputs)
            assert kept == plan.ops[op.name].kept, op.name
    assert any(chunked[op].splits[count] != WHOLE for op in plan.ops), "chunks share them all"
