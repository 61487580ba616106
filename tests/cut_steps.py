"""Steps of a few layers, cut in stages."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import tensorflow as tf

from tests.partitioned import Traced
from tfpar.compile.local import (
    TASK,
    LocalProgram,
    PipelineLowering,
    ProgramSet,
    Slicing,
    StagePass,
    WrittenStep,
    build_local_program,
    build_microbatched_program,
    pack_collectives,
    send_in_slices,
    split_batch,
    split_stages,
)
from tfpar.ir import BACKWARD, Roles, StepGraph, Tensor
from tfpar.pipeline import Schedule, assignable, partition_step, sent_whole
from tfpar.propagation import Anchors, prepare, propagate
from tfpar.spec import Mesh, Shard, replicated_spec

ONE, TWO = Mesh.of({"data": 1}), Mesh.of({"data": 2})
rng = np.random.default_rng(0)


def numbers(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype("float32")


def three_layers(x: tf.Tensor, y: tf.Tensor, *weights: tf.Tensor) -> list[tf.Tensor]:
    """A loss, and its gradients by the weights."""
    with tf.GradientTape() as tape:
        tape.watch(weights)
        h = x
        for weight in weights[:-1]:
            h = tf.tanh(h @ weight)
        loss = tf.reduce_mean((h @ weights[-1] - y) ** 2)
    return [loss, *tape.gradient(loss, weights)]


def normalized(x: tf.Tensor, y: tf.Tensor, *weights: tf.Tensor) -> list[tf.Tensor]:
    """The same, with statistics of the batch between layers."""
    with tf.GradientTape() as tape:
        tape.watch(weights)
        h = x
        for weight in weights[:-1]:
            h = h @ weight
            h = tf.tanh((h - tf.reduce_mean(h, 0)) / (1 + tf.math.reduce_std(h, 0)))
        loss = tf.reduce_mean((h @ weights[-1] - y) ** 2)
    return [loss, *tape.gradient(loss, weights)]


def tied(x: tf.Tensor, y: tf.Tensor, *weights: tf.Tensor) -> list[tf.Tensor]:
    """The last layer reads the weight of the first, too."""
    with tf.GradientTape() as tape:
        tape.watch(weights)
        h = tf.tanh(x @ weights[0])
        h = tf.tanh(h @ weights[1])
        loss = tf.reduce_mean((tf.tanh(h @ tf.transpose(weights[0])) @ weights[2] - y) ** 2)
    return [loss, *tape.gradient(loss, weights)]


def attending(x: tf.Tensor, y: tf.Tensor, *weights: tf.Tensor) -> list[tf.Tensor]:
    """Later layers read what the first ones give, and the weight of these, again and again."""
    with tf.GradientTape() as tape:
        tape.watch(weights)
        first = tf.tanh(tf.tanh(x @ weights[0]) @ weights[1])
        h = tf.tanh(first @ weights[1])
        for _ in range(3):
            h = tf.tanh((h * first) @ weights[1]) + first
        loss = tf.reduce_mean((h @ weights[2] - y) ** 2)
    return [loss, *tape.gradient(loss, weights)]


@functools.cache
def traced(function=three_layers, rows: int = 8) -> Traced:
    last = 4 if function is tied else 5
    args = [numbers(rows, 4), numbers(rows, 3), numbers(4, 5), numbers(5, 5), numbers(last, 3)]
    return Traced.of(function, args)


@dataclasses.dataclass
class Staged:
    """A step cut in stages: its parts equal numbers of ops, in their order."""

    whole: LocalProgram
    programs: ProgramSet

    def calls(self, actor: int) -> list[str]:
        """The tasks that an actor runs, in order, as a schedule names them."""
        ops = [*self.programs.programs.values()][actor].graph.ops
        names = [op.name.split("/") for op in ops if op.type == TASK]
        return [f"{task[1:]}{task[0]}{micro[10:]}" for _, task, micro in names]

    def sent(self) -> list[list[Tensor]]:
        """What a rank of each actor sends others, but for what the step gives: that goes to all."""
        graphs = [program.graph for program in self.programs.programs.values()]
        return [
            [
                t
                for op in graph.ops
                if op.type == "Send"
                for t in op.inputs
                if t not in graph.outputs
            ]
            for graph in graphs
        ]

    def types(self, actor: int) -> list[str]:
        return [op.type for op in [*self.programs.programs.values()][actor].graph.ops]


def cut(
    step: Traced,
    schedule: Schedule,
    mesh: Mesh = ONE,
    recompute: bool = False,
    weights: tuple = (),
    slicing: Slicing | None = None,
) -> Staged:
    """The step in stages."""
    cut, microbatches = StepGraph(step.prepared.graph, 2), schedule.num_microbatches
    ops = assignable(cut.graph, Roles.of(cut.graph))
    stage = partition_step(
        cut, {op: i * schedule.num_stages // len(ops) for i, op in enumerate(ops)}
    )
    graph, roles = cut.graph, Roles.of(cut.graph)
    places = {op: StagePass(stage[op], roles.phase[op] == BACKWARD) for op in graph.ops}
    whole = replicated_spec(mesh.num_axes)
    batch = (Shard(0), *whole[1:])
    anchors = Anchors(
        inputs=[batch, batch, *(weights or [whole] * 3)], outputs=[whole] * len(graph.outputs)
    )
    partitioned = propagate(prepare(graph, whole=sent_whole(graph, stage)), mesh, anchors)
    asked = PipelineLowering(places, schedule, recompute, slicing)
    if microbatches > 1:
        fed = set(graph.inputs[:2])
        laid = split_batch(partitioned, anchors, fed, microbatches)
        program = build_microbatched_program(laid, asked)
    else:
        program = build_local_program(partitioned, places)
        send_in_slices(program, asked)
    for each in program.graphs():
        pack_collectives(each, places=program.places)
    return Staged(program, split_stages([WrittenStep(program)] * schedule.num_actors, schedule))
