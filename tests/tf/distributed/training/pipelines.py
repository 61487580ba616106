"""Stages on processes of their own: pipeline x data x tensor, files, and data read in parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfpar as tap
from tests.cases import is_nightly
from tests.e2e.ghost import GhostBatchNormalization
from tests.e2e.test_patterns import MEGATRON, gpt
from tests.tf.distributed.training.layouts import tokens, unequal
from tests.tf.distributed.training.place import (
    Case,
    Place,
    Results,
    floats,
    perceptron,
    precision,
    regression,
    trained,
    weights,
)
from tfpar.compile.local import TASK
from tfpar.tf.keras.adapter import parallel_model

X, Y = regression(21)  # the last batch is smaller, and divides by nothing


def pipeline(stages: int, microbatches: int = 3, schedule: str = "1f1b", **more: Any) -> dict:
    """Options of `Place.parallel`."""
    return {"pipeline": tap.Pipeline(stages, microbatches, schedule, **more)}


def deep(optimizer: Any = "sgd", hidden: int = 2, **arguments: Any) -> keras.Model:
    """6 inputs, 2 outputs; `hidden` layers and one with dropout."""
    inputs = keras.Input((6,))
    h = layers.Dropout(0.3, seed=3)(layers.Dense(10, "tanh", name="first")(inputs))
    for i in range(hidden):
        h = layers.Dense(10, "tanh", name=f"fc{i}")(h)
    model = keras.Model(inputs, layers.Dense(2, name="last")(h))
    model.compile(optimizer, "mse", jit_compile=False, **arguments)
    return model


def normalized() -> keras.Model:
    """6 inputs, 2 outputs, and two normalisations by statistics of the batch."""
    inputs = keras.Input((6,))
    h = layers.BatchNormalization()(layers.Dense(10, "tanh", name="fc1")(inputs))
    h = layers.BatchNormalization()(layers.Dense(10, "tanh", name="fc2")(h))
    model = keras.Model(inputs, layers.Dense(2, name="last")(h))
    model.compile("sgd", "mse", jit_compile=False)
    return model


def check_stages(place: Place, model: keras.Model, mesh: tuple[int, ...], stages: int) -> None:
    """The step runs as asked, and this process stores the weights of its own stages alone."""
    if place.size == 1:
        return
    state, plan = parallel_model(model), tap.plan_of(model)
    assert plan.mesh.shape == mesh and plan.stages.schedule.num_stages == stages
    groups = plan.stages.groups(plan.mesh.size)
    own = next(actor for actor, ranks in enumerate(groups) if place.rank in ranks)
    program = state.executables["train"].program.function
    called = [node.name for node in program.definition.node_def if node.op.endswith("Call")]
    ran = [name.split("/")[1] for name in called]
    assert ran and {plan.stages.schedule.actors[int(task[1:])] for task in ran} == {own}
    stored = {v.path for v in model.trainable_variables if v._value.shards}
    owners = plan.stages.owners
    assert stored == {
        v.path
        for v in model.trainable_variables
        if plan.stages.schedule.actors[owners[v.path]] == own
    }
    whole = sum(op.type == TASK for op in state.executables["train"].local.graph.ops)
    assert len(ran) < whole


def scored(place: Place, model: keras.Model) -> Results:
    """By evaluation and prediction, on batches that do not divide."""
    scores = model.evaluate(X, Y, batch_size=8, verbose=0, return_dict=True)
    return {
        **{f"score/{name}": floats(value) for name, value in scores.items()},
        "predicted": model.predict(X, batch_size=8, verbose=0),
    }


def stages_and_data_parallelism(place: Place) -> Results:
    """2 x 2 x 1: dropout, clipping by the norm of all stages, metrics, scores."""
    with place.parallel(mesh=[4], **pipeline(2)):
        optimizer = keras.optimizers.Adam(0.01, global_clipnorm=0.3)
        model = deep(optimizer, metrics=["mae"])
    results = trained(model, X, Y, batch_size=8, shuffle=False)
    check_stages(place, model, (2,), 2)
    return {**results, **scored(place, model)}


@precision("float32")
def stages_and_tensor_parallelism(place: Place) -> Results:
    """2 x 1 x 2: a transformer split as Megatron has it, as on machines that slow links join: what
    both ranks of a stage hold goes to the next in halves."""
    levels = [tap.Level(2, 1e5, 0.0), tap.Level(2, 1e12, 0.0)]
    slow = tap.Cluster.regular("slow", tap.Device({"float32": 1e9}, 1e9, 1e9), levels)
    with place.parallel(MEGATRON, [2, 2], cluster=slow, **pipeline(2)):
        model = gpt(1, keras.optimizers.AdamW(1e-3, global_clipnorm=1.0))
    results = trained(model, *tokens(14), batch_size=8, shuffle=False)
    check_stages(place, model, (1, 2), 2)
    if place.size > 1:
        graphs = parallel_model(model).executables["train"].local.graphs()
        gathered = [op for graph in graphs for op in graph.ops if op.type == "AllGather"]
        assert any("/slices" in op.name for op in gathered)
    return results


def four_stages(place: Place) -> Results:
    """4 x 1 x 1, with the backward pass in halves, and weights of samples."""
    with place.parallel(mesh=[4], **pipeline(4, 4, "zb-h1")):
        model = deep("adam", weighted_metrics=["mse"])
    weight = np.linspace(0.5, 2.0, len(X))
    results = trained(model, X, Y, batch_size=8, sample_weight=weight, shuffle=False)
    check_stages(place, model, (1,), 4)
    return results


def unlike_numbers_of_ranks(place: Place) -> Results:
    """A stage on one rank, the other on three: dropout, clipping by the norm of all stages,
    metrics, scores; microbatches of which each stage has its own parts."""
    with place.parallel(mesh=[4], **pipeline(2, 2, ranks=[[2], [0, 1, 3]])):
        optimizer = keras.optimizers.Adam(0.01, global_clipnorm=0.3)
        model = deep(optimizer, metrics=["mae"])
    results = trained(model, X, Y, batch_size=8, shuffle=False)
    check_stages(place, model, (1,), 2)
    return {**results, **scored(place, model)}


def unlike_stages_with_joins(place: Place) -> Results:
    """On 2, 1 and 1 ranks, with the backward pass in halves: what joins has of batch statistics."""
    with place.parallel(mesh=[4], **pipeline(3, 2, "zb-h1", ranks=[[1, 3], [0], [2]])):
        model = normalized()
    return trained(model, X, Y, batch_size=8, shuffle=False)


def unlike_stages_that_send_slices(place: Place) -> Results:
    """On 1, 2 and 1 ranks, each on a machine of its own: what both of the second read of others,
    activations and gradients, comes to each in halves, and they gather it."""
    device = tap.Device({"float32": 1e9}, 1e9, 1e9)
    nodes = tuple(tap.Node(device, (tap.Level(n, 1e12, 1e-7),)) for n in (1, 2, 1))
    machines = tap.Cluster("slow", nodes, (tap.Level(3, 1e5, 1e-6),))
    ranks = [[0], [1, 2], [3]]
    split = [tap.shard("fc0/kernel", 1, "model"), tap.stage("first", 0), tap.stage("last", 2)]
    with place.parallel(split, {"model": 4}, cluster=machines, **pipeline(3, 2, ranks=ranks)):
        model = deep(hidden=2)
    results = trained(model, X, Y, batch_size=8, shuffle=False)
    if place.size > 1:
        programs = parallel_model(model).executables["train"].compiled.programs
        graphs = [g for program in programs.programs.values() for g in program.graphs()]
        gathered = [op for graph in graphs for op in graph.ops if op.type == "AllGather"]
        assert any("arrival" in op.name for op in gathered), gathered
    return results


def virtual_stages(place: Place) -> Results:
    """Each set of ranks has two."""
    with place.parallel(mesh=[4], **pipeline(2, 4, "zb-v")):
        model = deep()
    results = trained(model, X, Y, batch_size=16, shuffle=False)
    check_stages(place, model, (2,), 4)
    return results


def batch_statistics_in_stages(place: Place) -> Results:
    """Microbatches join in the midst of each stage; each set of ranks has two stages."""
    with place.parallel(mesh=[4], **pipeline(2, 2, "interleaved")):
        model = normalized()
    return trained(model, X, Y, batch_size=8, shuffle=False)


@precision("float32")
def statistics_of_microbatches(place: Place) -> Results:
    """Each microbatch, of both ranks of a stage together, is normalised by itself."""
    normalization = layers.BatchNormalization(name="norm")
    if place.size == 1:
        normalization = GhostBatchNormalization(2, 2, name="norm")
    with place.parallel(mesh=[4], **pipeline(2, 2, batch_statistics="microbatch")):
        inputs = keras.Input((6,))
        h = normalization(layers.Dense(10, "tanh", name="fc1")(inputs))
        h = layers.Dense(10, "tanh", name="fc2")(h)
        model = keras.Model(inputs, layers.Dense(2, name="last")(h))
        model.compile("sgd", "mse", jit_compile=False, run_eagerly=place.size == 1)
    results = trained(model, X, Y, batch_size=8, shuffle=False)
    check_stages(place, model, (2,), 2)
    return results


# --- files --------------------------------------------------------------------------------------

JOURNEY: Sequence[tuple[Sequence[int], Mapping[str, Any]]] = (
    ([4], pipeline(2)),
    ([4], {}),
    ([4], pipeline(2, ranks=[[0, 1, 2], [3]])),
    ([4], pipeline(4)),
)
"""A pipeline of two with data parallelism, data parallelism alone, a pipeline of three ranks and
one, a pipeline of four."""


def checkpoints_move_between_pipelines(place: Place) -> Results:
    """Each goes on where the one before it was, in the middle of an epoch."""
    found: Results = {}
    for epochs, (mesh, options) in enumerate(JOURNEY, 1):
        if place.size == 1 and epochs < len(JOURNEY):
            continue
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(7)
        with place.parallel(mesh=mesh, **options):
            model = deep(keras.optimizers.Adam(0.01, name="adam"))
        kept = [tap.Checkpoint(place.folder / "kept")] if place.size > 1 else []
        model.fit(X, Y, batch_size=8, epochs=epochs, shuffle=False, verbose=0, callbacks=kept)
        found = weights(model)
    return found


def stored(model: keras.Model) -> Results:
    """What a checkpoint has of layers and their optimizer, by path."""
    found = [*model.weights, *model.optimizer.variables]
    return {v.path: keras.ops.convert_to_numpy(v) for v in found}


def models_saved_in_stages(place: Place) -> Results:
    """`.keras` and weights: got, set, saved, loaded by another pipeline and, at night, by none."""
    with place.parallel(mesh=[4], **pipeline(2)):
        model = deep(keras.optimizers.Adam(0.01, name="adam"))
    results = trained(model, X, Y, batch_size=8, shuffle=False)
    model.save(place.folder / "model.keras")
    model.save_weights(place.folder / "model.weights.h5")
    kept, held = place.folder / "kept", stored(model)
    if place.size > 1:
        tap.save_checkpoint(model, kept)
    model.set_weights([0.5 * w for w in model.get_weights()])
    halved = weights(model)
    loaders = [("four", pipeline(4)), *([("none", {})] if is_nightly() else [])]
    for name, options in loaders:
        with place.parallel(mesh=[4], **options):
            loaded = keras.models.load_model(place.folder / "model.keras")
        later = trained(loaded, X, Y, batch_size=8, shuffle=False)
        assert int(loaded.optimizer.iterations) == 6
        results |= {f"{name} {key}": value for key, value in later.items()}
        if place.size > 1:
            tap.restore_checkpoint(loaded, kept)
            found = stored(loaded)
            assert found.keys() == held.keys(), (*found, *held)
            for path, value in held.items():
                np.testing.assert_array_equal(found[path], value, err_msg=path)
    model.load_weights(place.folder / "model.weights.h5")
    return {
        **results,
        **{f"halved {key}": value for key, value in halved.items()},
        **{f"loaded {key}": value for key, value in weights(model).items()},
    }


# --- data ---------------------------------------------------------------------------------------


def data_read_in_parts_by_stages(place: Place) -> Results:
    """Ranks of all stages of one data index read the same part."""
    x, y = X[:16], Y[:16]

    def part(index: int, count: int) -> tf.data.Dataset:
        if place.size > 1:
            assert (index, count) == (place.rank % 2, 2)
        batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(8 // count)
        return batches.shard(count, index)  # batches of 8 rows, of which each has its own

    with place.parallel(mesh=[4], **pipeline(2, 2)):
        model = deep()
    batch = tuple(tf.TensorSpec((8, *a.shape[1:]), a.dtype) for a in (x, y))
    dataset = part(0, 1) if place.size == 1 else tap.shard_data(model, part, batch)
    return trained(model, dataset, epochs=2)


def stages_on_machines_that_differ(place: Place) -> Results:
    """Ranks 0 and 2 are fast and run one stage, 1 and 3 the other; data is read in parts."""
    fast = tap.Device({"float32": 4e9}, 1e9, 4e9)
    slow = dataclasses.replace(fast, flops={"float32": 1e9}, memory_bandwidth=1e9)
    nodes = tuple(map(tap.Node, (fast, slow, fast, slow)))
    machines = tap.Cluster("mixed", nodes, (tap.Level(4, 1e9, 1e-6),))
    x, y = X[:16], Y[:16]

    def part(index: int, count: int) -> tf.data.Dataset:
        if place.size > 1:
            assert (index, count) == (place.rank // 2, 2)
        batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(8 // count)
        return batches.shard(count, index)

    with place.parallel(mesh=[4], planner="tap", cluster=machines, **pipeline(2, 2)):
        model = deep(hidden=4)
    batch = tuple(tf.TensorSpec((8, *a.shape[1:]), a.dtype) for a in (x, y))
    dataset = part(0, 1) if place.size == 1 else tap.shard_data(model, part, batch)
    results = trained(model, dataset, epochs=2)
    if place.size > 1:
        plan = tap.plan_of(model)
        assert plan.mesh.shape == (2, 1) and {*plan.stages.groups(2)} == {(0, 2), (1, 3)}
        check_stages(place, model, (2, 1), 2)
    return {**results, **scored(place, model)}


def stages_of_ranks_of_unequal_speed(place: Place) -> Results:
    """In both stages the second rank is slower, and gets fewer samples; not of the last batch,
    which is no multiple of the microbatches."""
    by_hand = [tap.batch("data"), tap.replicate(".*")]
    by_hand += [tap.stage("first|fc0", 0), tap.stage("fc1|last", 1)]
    machines = unequal(3, 1, 3, 1)
    with place.parallel(by_hand, [4], "tap", cluster=machines, **pipeline(2, 2)):
        model = deep("adam", metrics=["mae"])
    results = trained(model, X, Y, batch_size=8, shuffle=False)
    check_stages(place, model, (2,), 2)
    if place.size > 1:
        ((more, fewer),) = tap.plan_of(model).shares.values()
        assert more + fewer == 8 and more > fewer, (more, fewer)
    return {**results, **scored(place, model)}


def unlike_stages_of_ranks_of_unequal_speed(place: Place) -> Results:
    """Of the three ranks of a stage the second is fast, and gets half of each microbatch; the other
    stage has one rank. What goes between them differs in shape by rank."""
    by_hand = [tap.batch("data"), tap.replicate(".*")]
    by_hand += [tap.stage("first|fc0", 0), tap.stage("fc1|last", 1)]
    machines, ranks = unequal(1, 3, 3, 1), [[2], [0, 1, 3]]
    with place.parallel(by_hand, [4], "tap", cluster=machines, **pipeline(2, 2, ranks=ranks)):
        model = deep(keras.optimizers.Adam(0.01, global_clipnorm=0.3), metrics=["mae"])
    results = trained(model, X, Y, batch_size=8, shuffle=False)
    check_stages(place, model, (1,), 2)
    if place.size > 1:
        assert [one.shares for one in tap.plan_of(model).by_layout] == [{}, {"data": (2, 4, 2)}]
    return {**results, **scored(place, model)}


def several_steps_of_a_pipeline_in_one_execution(place: Place) -> Results:
    with place.parallel(mesh=[4], **pipeline(2)):
        model = deep(steps_per_execution=2)
    return trained(model, X, Y, batch_size=6, epochs=2)


def verification_of_a_pipeline(place: Place) -> Results:
    """`verify` finds no difference, and leaves the model as it was."""
    with place.parallel(mesh=[4], **pipeline(2, 2)):
        model = perceptron()
    if place.size > 1:
        report = tap.verify(model, X, Y, batch_size=8)
        assert report, str(report)
    return trained(model, X, Y, batch_size=8, shuffle=False)


SHAPES: list[Case] = [stages_and_data_parallelism, stages_and_tensor_parallelism, four_stages]
"""Of pipeline x data x tensor."""

ON_FOUR: list[Case] = [
    *SHAPES,
    unlike_numbers_of_ranks,
    unlike_stages_with_joins,
    unlike_stages_that_send_slices,
    virtual_stages,
    stages_of_ranks_of_unequal_speed,
    unlike_stages_of_ranks_of_unequal_speed,
    checkpoints_move_between_pipelines,
    verification_of_a_pipeline,
]
WITH_TENSORFLOW: list[Case] = [
    *SHAPES,
    unlike_numbers_of_ranks,
    unlike_stages_with_joins,
    unlike_stages_that_send_slices,
    batch_statistics_in_stages,
    statistics_of_microbatches,
    models_saved_in_stages,
    data_read_in_parts_by_stages,
    stages_on_machines_that_differ,
    stages_of_ranks_of_unequal_speed,
    unlike_stages_of_ranks_of_unequal_speed,
    several_steps_of_a_pipeline_in_one_execution,
]
"""By TensorFlow's own collectives."""
