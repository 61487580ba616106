"""Programs in microbatches: what runs once, what in which round, and what is added up."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import tensorflow as tf

from tests.cases import at_night
from tests.partitioned import Traced, devices
from tests.planning.inter_op.stages.steps import Staged
from tfpar.compile.local.chunks import split_batch
from tfpar.compile.local.local_graph import TASK, LocalProgram, build_local_program
from tfpar.compile.local.microbatch_rounds import schedule_rounds
from tfpar.compile.local.microbatches import build_microbatched_program
from tfpar.compile.local.packing import pack_collectives
from tfpar.compile.local.programs import ProgramSet
from tfpar.compile.local.rank_local_axis import Repetition
from tfpar.cost import StageTransfers
from tfpar.ir import Graph, Op
from tfpar.propagation import Anchors, propagate
from tfpar.spec import Mesh, Replicate, Shard, replicated_spec
from tfpar.tf.runtime import InProcessProgram

ONE, TWO = Mesh.of({"data": 1}), Mesh.of({"data": 2})
rng = np.random.default_rng(0)


def numbers(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype("float32")


def microbatched(
    function: Callable[..., object],
    args: Sequence[np.ndarray],
    microbatches: int,
    mesh: Mesh = ONE,
    batched: int = 1,
) -> LocalProgram:
    """The program of `function` with its first arguments in microbatches; checked by running it.

    Args:
        batched: how many arguments hold the batch.
    """
    traced = Traced.of(function, args)
    whole, graph = replicated_spec(mesh.num_axes), traced.prepared.graph
    anchors = Anchors(
        inputs=[(Shard(0),) if i < batched else whole for i in range(len(args))],
        outputs=[whole] * len(graph.outputs),
    )
    partitioned = propagate(traced.prepared, mesh, anchors)
    cut = set(graph.inputs[:batched])
    program = build_microbatched_program(split_batch(partitioned, anchors, cut, microbatches))
    assert program.mesh == mesh
    for each in program.graphs():
        pack_collectives(each)
    results = InProcessProgram(ProgramSet.of(program), devices(mesh))(
        [tf.constant(a) for a in traced.args], []
    )
    for got, want in zip(results, traced.expected, strict=True):
        np.testing.assert_allclose(got.numpy(), want, 1e-4, 1e-5)
    return program


def calls(program: LocalProgram) -> list[Op]:
    return [op for op in program.graph.ops if op.type == TASK]


def rounds(program: LocalProgram) -> list[set[str]]:
    """The op types of each round, sources aside."""
    return [
        {op.type for op in body.ops} - {"Const", "Placeholder"} for body in program.graphs()[1:]
    ]


def ops(graph: Graph, op_type: str) -> list[Op]:
    return [op for op in graph.ops if op.type == op_type]


def test_a_sum_over_the_batch_is_added_up_from_call_to_call():
    program = microbatched(lambda x: tf.reduce_sum(tf.tanh(x), 0), [numbers(8, 3)], 4)
    assert [types - {"Identity"} for types in rounds(program)] == [{"Tanh", "Sum", "AddV2"}]
    first, *others = calls(program)
    assert len(others) == 3
    assert [op.inputs[-1] for op in others] == [op.outputs[-1] for op in (first, *others[:-1])]
    assert first.inputs[-1].op.type == "Fill"


def test_calls_come_one_behind_the_other():
    program = microbatched(lambda x: tf.tanh(x), [numbers(6, 3)], 3)
    first, second, third = calls(program)
    assert second.control == [first] and third.control == [second]


def test_what_does_not_depend_on_the_batch_runs_once():
    weights = numbers(3, 3)
    program = microbatched(
        lambda x, w: tf.reduce_sum(x @ tf.tanh(w), 0), [numbers(8, 3), weights], 4
    )
    assert "Tanh" not in rounds(program)[0]
    assert len(ops(program.graph, "Tanh")) == 1


def test_the_graph_does_not_grow_with_microbatches_but_for_their_calls_and_blocks():
    sizes = [
        len(microbatched(lambda x: tf.reduce_sum(tf.tanh(x) ** 2, 0), [numbers(8, 3)], m).graph.ops)
        for m in (2, 4, 8)
    ]
    each = (sizes[1] - sizes[0]) / 2
    assert sizes[2] - sizes[1] == 4 * each and each <= 4  # a call, and a block with its bounds


def test_what_reads_the_whole_batch_and_a_part_of_it_joins_in_a_second_round():
    def centred(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.exp(x - tf.reduce_mean(x, 0)), 0)

    program = microbatched(centred, [numbers(8, 3)], 4)
    first, second = rounds(program)
    assert "Exp" in second and "Exp" not in first
    assert len(calls(program)) == 8


def test_a_join_of_inputs_alone_leaves_the_work_to_the_last_round():
    def weighted(x: tf.Tensor, weight: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        total = tf.reduce_sum(weight)
        return tf.reduce_sum(tf.tanh(x @ w) * (weight / total)[:, None], 0)

    args = [numbers(8, 3), np.abs(numbers(8)), numbers(3, 3)]
    program = microbatched(weighted, args, 4, batched=2)
    first, second = rounds(program)
    assert {"MatMul", "Tanh"} <= second and not {"MatMul", "Tanh"} & first


def test_what_reads_a_join_does_not_hold_up_what_only_reads_activations():
    """As where a plan gathers the losses of all samples: the backward pass does not read them."""

    def with_softmax_of_losses(x: tf.Tensor, w: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        h = tf.tanh(x @ w)
        losses = tf.reduce_mean(h, 1)
        spread = tf.reduce_sum(tf.exp(losses - tf.reduce_max(losses)))
        return tf.matmul(x, tf.square(h), transpose_a=True), spread

    program = microbatched(with_softmax_of_losses, [numbers(8, 3), numbers(3, 5)], 4)
    first, second = rounds(program)
    assert "Square" in first and "Square" not in second
    assert "Exp" in second  # it is what waits
    kept = [t.shape for t in calls(program)[4].inputs if t.op in calls(program)[:4]]
    assert (2,) in kept and (2, 5) not in kept  # losses, not activations


@pytest.mark.parametrize("rows", [5, 7, 1])
def test_ragged_batches_are_padded_and_masked(rows):
    def loss(x: tf.Tensor, w: tf.Tensor) -> list[tf.Tensor]:
        h = tf.nn.softmax(x @ w)
        return [tf.reduce_mean(h, 0), tf.reduce_max(h, 0), h]

    microbatched(loss, [numbers(rows, 4), numbers(4, 3)], 3, TWO)


def test_sums_travel_once_over_ranks():
    program = microbatched(
        lambda x, w: tf.transpose(x) @ (x @ w), [numbers(8, 3), numbers(3, 2)], 4, TWO
    )
    assert len(ops(program.graph, "AllReduce")) == 1
    assert not any(ops(body, "AllReduce") for body in program.graphs()[1:])


def test_ranks_meet_inside_a_round_where_they_have_to():
    mesh = Mesh.of({"data": 1, "model": 2})

    def two_layers(x: tf.Tensor, a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.tanh(tf.nn.relu(x @ a) @ b), 0)

    traced = Traced.of(two_layers, [numbers(8, 4), numbers(4, 6), numbers(6, 4)])
    graph, whole = traced.prepared.graph, replicated_spec(2)
    anchors = Anchors(
        inputs=[whole, (Replicate(), Shard(1)), (Replicate(), Shard(0))],
        outputs=[whole] * len(graph.outputs),
    )
    partitioned = propagate(traced.prepared, mesh, anchors)
    laid = split_batch(partitioned, anchors, {graph.inputs[0]}, 4)
    program = build_microbatched_program(laid)
    (body,) = program.graphs()[1:]
    assert len(ops(body, "AllReduce")) == 1 and not ops(program.graph, "AllReduce")
    (got,) = InProcessProgram(ProgramSet.of(program), devices(mesh))(
        [tf.constant(a) for a in traced.args], []
    )
    np.testing.assert_allclose(got.numpy(), traced.expected[0], 1e-4, 1e-5)


@pytest.mark.parametrize("reduction", [tf.reduce_max, tf.reduce_min, tf.reduce_prod])
def test_other_reductions_are_combined_as_they_are(reduction):
    microbatched(lambda x: reduction(tf.tanh(x), 0), [numbers(6, 3)], 3)


def test_sums_in_16_bits_are_made_in_32():
    program = microbatched(
        lambda x: tf.reduce_sum(tf.cast(x, tf.bfloat16), 0), [np.ones((512, 2), "float32")], 64
    )
    assert {op.inputs[-1].dtype for op in calls(program)} == {"float32"}


def test_loops_run_in_a_round():
    def cumulated(x: tf.Tensor) -> tf.Tensor:
        out = tf.while_loop(
            lambda i, _: i < 3, lambda i, h: (i + 1, tf.tanh(h + 1.0)), (0, x), maximum_iterations=3
        )[1]
        return tf.reduce_sum(out, 0)

    assert any(
        "While" in op or "StatelessWhile" in op
        for op in rounds(microbatched(cumulated, [numbers(6, 3)], 3))
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("gpt", "resnet", "normalized_by_kernels", "penalized"),
        *at_night("t5_3_layers", "unet", "clip_4_layers", "gshard_moe"),
    ],
)
def test_there_are_joins_where_programs_have_several_rounds(name):
    staged = Staged.of(name, 2).cut(4)
    program = build_local_program(staged.laid)
    rounds = schedule_rounds(program, Repetition(program, {}))
    assert bool(StageTransfers(staged, (0, 1)).stage_graph().joins) == (rounds.count > 1)
