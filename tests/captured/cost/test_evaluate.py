"""What a step costs: single ops by hand, whole steps against what is emitted."""

import collections
import dataclasses
import functools
import random
from typing import NamedTuple

import keras
import numpy as np
import pytest
from keras import layers

import tfpar as tap
from tests.captured.cost.test_op_compute import CLUSTER, DEVICE, FOUR, R
from tests.clusters import two_levels
from tests.e2e.test_patterns import HIDDEN, LENGTH, MEGATRON, VOCABULARY, gpt
from tests.partitioned import OP_TYPES, ends
from tests.plan.graphs import mlp, partition
from tfpar.cluster import Link
from tfpar.compile import prepare_step, simplify_step
from tfpar.compile.local import COLLECTIVE_TYPES, build_local_program
from tfpar.cost import collective_seconds, evaluate
from tfpar.cost.op_compute import update_seconds
from tfpar.ir import BACKWARD, FORWARD, PHASES, UPDATE, Graph, Roles, fingerprint, planning_graph
from tfpar.plans import plan_from_constraints
from tfpar.propagation import propagate
from tfpar.spec import Mesh, Shard, replicated_spec
from tfpar.tf.capture import argument_specs
from tfpar.tf.keras import parallel_model

MB = 2**20


# --- whole steps: what is priced is what is emitted --------------------------------------

LONG = two_levels("test", 2, 2, DEVICE, Link(1e9, 1e-6), Link(1e8, 1e-5))


def convnet():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(8, 3, padding="same", use_bias=False, name="conv1"),
            layers.BatchNormalization(name="norm1"),
            layers.ReLU(),
            layers.Conv2D(12, 3, strides=2, padding="same", name="conv2"),
            layers.BatchNormalization(name="norm2"),
            layers.ReLU(),
            layers.GlobalAveragePooling2D(),
            layers.Dense(5, name="head"),
        ],
        name="convnet",
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, jit_compile=False)
    return model


def small_mlp():
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(10, "relu", use_bias=False, name="fc1"),
            layers.Dense(4, use_bias=False, name="fc2"),
        ],
        name="mlp",
    )
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", jit_compile=False)
    return model


IDS = np.zeros((8, LENGTH), "int32")
MODELS = {
    "gpt": (lambda: gpt(optimizer=keras.optimizers.Adam()), (IDS, IDS)),
    "convnet": (convnet, (np.zeros((8, 8, 8, 3), "float32"), np.zeros(8, "int32"))),
    "mlp": (small_mlp, (np.zeros((8, 6), "float32"), np.zeros((8, 4), "float32"))),
}


@functools.cache
def captured(name):
    """(graph, prepared, roles, batched) of a training step."""
    build, data = MODELS[name]
    keras.utils.clear_session(free_memory=False)
    with tap.auto_parallel(tap.split([2])):
        model = build()
    step = parallel_model(model).step("train").capture(argument_specs((data,)))
    prepared = prepare_step(step)
    roles = Roles.of(step.graph, [t for g in step.gradients for t in g.tensors])
    return step.graph, prepared, roles, len(data)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_step_cut_at_its_update_is_the_one_captured_without(name):
    build, data = MODELS[name]
    cuts = []
    for with_update in (True, False):
        keras.utils.clear_session(free_memory=False)
        with tap.auto_parallel(tap.split([2])):
            model = build()
        state = parallel_model(model)  # which holds it weakly
        specs = argument_specs((data,))
        step = state.step("train").capture(specs) if with_update else state.capture_gradients(specs)
        simplify_step(step)
        cuts.append(fingerprint(planning_graph(step.graph, step.gradients).graph))
    assert cuts[0] == cuts[1]


def laid_out(name, mesh, constraints=(), variables=None, axes=None):
    graph, prepared, roles, num_batched = captured(name)
    plan = plan_from_constraints(graph, mesh, constraints)
    axes = plan.batch_axes if axes is None else axes
    fed = tuple(Shard(0) if n in axes else R for n in mesh.axis_names)
    anchors = plan.anchors()
    anchors = dataclasses.replace(
        anchors,
        inputs=[fed] * num_batched
        + [replicated_spec(mesh.num_axes)] * (len(graph.inputs) - num_batched),
        variables={**anchors.variables, **(variables or {})},
        outputs=[replicated_spec(mesh.num_axes)] * len(graph.outputs),
    )
    return propagate(prepared, mesh, anchors), roles


class Traffic(NamedTuple):
    """The collectives of one kind, phase and group, one after another, each by itself."""

    kind: str
    axes: tuple[str, ...]
    phase: str
    count: int
    num_bytes: int
    seconds: float


def traffic(partitioned, cluster, roles):
    mesh, found = partitioned.mesh, {}
    for moved in partitioned.communications(roles.wire_dtypes):
        key = (
            moved.kind,
            tuple(mesh.axis_names[a] for a in moved.axes),
            PHASES[roles.phase[moved.op]],
        )
        seconds = collective_seconds(moved.kind, moved.axes, moved.num_bytes, mesh, cluster)
        before = found.get(key, (0, 0, 0.0))
        found[key] = before[0] + 1, before[1] + moved.num_bytes, before[2] + seconds
    return [Traffic(*key, *sums) for key, sums in found.items()]


def check_traffic(partitioned, roles, cluster=LONG):
    """`communications()` is `collectives()` is what the rewrite emits; returns it by group."""
    found = traffic(partitioned, cluster, roles)
    priced = collections.Counter(), collections.Counter()
    for entry in found:
        assert entry.count > 0 and entry.num_bytes >= 0 and entry.seconds > 0
        priced[0][entry.kind, entry.axes] += entry.count
        priced[1][entry.kind, entry.axes] += entry.num_bytes
    predicted = collections.Counter(), collections.Counter()
    for kind, axes, num_bytes in partitioned.collectives():
        predicted[0][kind, axes] += 1
        predicted[1][kind, axes] += num_bytes
    assert priced == predicted
    emitted = collections.Counter(), collections.Counter()
    for op in build_local_program(partitioned).graph.ops:
        if op.type in COLLECTIVE_TYPES:
            emitted[0][op.type] += 1
            emitted[1][op.type] += sum(max(i.num_bytes, o.num_bytes) for i, o in ends(op))
    for by_kind, by_group in zip(emitted, priced, strict=True):
        total = collections.Counter()
        for (kind, _), value in by_group.items():
            total[OP_TYPES[kind]] += value
        assert by_kind == total
    return found


def check_seconds(partitioned, roles, found, cluster=LONG):
    """The waits of `evaluate` are those of all collectives, but for what is deferred, or packed."""
    packed = evaluate(partitioned, cluster, roles)
    cost = evaluate(partitioned, cluster, dataclasses.replace(roles, graph=Graph()))
    assert cost.seconds - packed.seconds >= -1e-12
    assert (cost.seconds > packed.seconds) == (cost.collectives > packed.collectives)
    listed = {name: sum(e.seconds for e in found if e.phase == name) for name in PHASES}
    assert cost.communication_s[FORWARD] == pytest.approx(listed["forward"], rel=1e-9, abs=1e-15)
    # Packing spares starts.
    backward = cost.communication_s[BACKWARD] + cost.gradients_s
    for seconds, name in ((backward, "backward"), (cost.communication_s[UPDATE], "update")):
        assert seconds <= listed[name] * (1 + 1e-9) + 1e-15
    assert cost.collectives <= sum(e.count for e in found)
    assert cost.exposed_s <= cost.gradients_s
    parts = (*cost.compute_s, *cost.communication_s, cost.exposed_s)
    assert min(parts) >= 0 and cost.seconds == pytest.approx(sum(parts) - cost.hidden_s, rel=1e-12)
    return cost


def bytes_of(found, kind, phase):
    return sum(e.num_bytes for e in found if (e.kind, e.phase) == (kind, phase))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_data_parallelism(name):
    partitioned, roles = laid_out(name, Mesh.of([2, 2]))
    found = check_traffic(partitioned, roles)
    cost = check_seconds(partitioned, roles, found)
    assert {e.kind for e in found} == {"all_reduce"}
    weights = sum(v.num_bytes for v in partitioned.variable_specs if v.trainable)
    assert cost.weight_bytes == weights
    # Adam adds up the squares of the rows of a sparse gradient too.
    squares = VOCABULARY * HIDDEN * 4 if name == "gpt" else 0
    assert bytes_of(found, "all_reduce", "update") == squares
    reduced = bytes_of(found, "all_reduce", "backward")
    moving = 2 * (8 + 12) * 4 if name == "convnet" else 0
    assert reduced == weights - moving
    # The mean's gradient needs those of BatchNorm's scale and offset: 4 all-reduces by trees, up
    # and down one round in the node and one between nodes.
    waits = 4 * 22e-6 + 2 * 2 * (8 + 12) * 4 / 1e8 if name == "convnet" else 0.0
    assert cost.communication_s[BACKWARD] == pytest.approx(waits)
    assert cost.gradients_s > 0, "beside the backward pass"


def test_megatron_waits_for_its_all_reduces():
    partitioned, roles = laid_out("gpt", Mesh.of([2, 2]), MEGATRON)
    found = check_traffic(partitioned, roles)
    cost = check_seconds(partitioned, roles, found)
    activations = 4 * LENGTH * HIDDEN * 4  # half of the batch, in floats
    # Neighbours in a node: 2 messages, the payload once over; attention and MLP wait for one each.
    waits = 2 * (2e-6 + activations * 1e-9)
    along = {e.phase: e for e in found if e.axes == ("model",)}
    assert along["forward"].num_bytes == 2 * activations
    assert along["forward"].seconds == pytest.approx(waits)
    assert cost.communication_s[BACKWARD] == pytest.approx(waits)
    # Between nodes, where 2 groups share the link: the loss.
    assert cost.communication_s[FORWARD] == pytest.approx(waits + 2e-5 + 4 / 0.5e8)
    whole, _ = laid_out("gpt", Mesh.of([2, 2]), [tap.batch("data")])
    assert cost.weight_bytes < evaluate(whole, LONG, roles).weight_bytes
    assert cost.compute_s[FORWARD] < evaluate(whole, LONG, roles).compute_s[FORWARD]


def test_zero_scatters_gradients_beside_the_backward_pass():
    constraints = [
        tap.batch("data"),
        tap.shard(r"adam.*fc1_kernel_(momentum|velocity)", dim=0, axis="data"),
    ]
    partitioned, roles = laid_out("gpt", Mesh.of([2]), constraints)
    found = check_traffic(partitioned, roles)
    cost = check_seconds(partitioned, roles, found)
    kernel = 16 * 64 * 4
    assert bytes_of(found, "reduce_scatter", "backward") == kernel
    assert bytes_of(found, "all_gather", "update") == kernel
    assert cost.communication_s[BACKWARD] == 0, "nobody but the update waits for gradients"
    plain = evaluate(laid_out("gpt", Mesh.of([2]), [tap.batch("data")])[0], LONG, roles)
    assert plain.state_bytes - cost.state_bytes == pytest.approx(2 * kernel / 2), (
        "half of two slots"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seed", range(4))
def test_random_layouts(name, seed):
    rng = random.Random(seed)
    mesh = (Mesh.of([2, 2]), Mesh.of([3]), Mesh.of([4]), Mesh.of([2, 2]))[seed]
    graph = captured(name)[0]
    variables = {
        v.name: tuple(
            rng.choice([R, *(Shard(d) for d, n in enumerate(v.shape) if n > 1)]) for _ in mesh.shape
        )
        for v in graph.variables
        if v.trainable and rng.random() < 0.6
    }
    axes = [n for n in mesh.axis_names if rng.random() < 0.5]
    partitioned, roles = laid_out(name, mesh, (), variables, axes)
    check_seconds(partitioned, roles, check_traffic(partitioned, roles))


def test_one_rank_communicates_nothing():
    partitioned, roles = laid_out("gpt", Mesh.of([1]))
    cost = evaluate(partitioned, LONG, roles)
    assert traffic(partitioned, LONG, roles) == []
    assert cost.communication_s == (0, 0, 0) and cost.gradients_s == cost.exposed_s == 0
    assert cost.seconds == pytest.approx(sum(cost.compute_s))


# --- memory ---------------------------------------------------------------------------


def memory(mesh, *constraints):
    partitioned, roles = laid_out("mlp", mesh, constraints)
    kept = {t for t in roles.activations if len(t.shape or ()) == 2}
    return evaluate(partitioned, LONG, roles), kept


WEIGHTS = (6 * 10 + 10 * 4) * 4


def test_memory_of_a_step_that_is_whole():
    cost, kept = memory(Mesh.of([2]), tap.batch())
    assert cost.weight_bytes == WEIGHTS
    assert cost.gradient_bytes == WEIGHTS
    # Momenta, and scalars: iterations and learning rate, loss and its counts.
    assert 0 <= cost.state_bytes - WEIGHTS < 64
    # relu(x W1) (8 x 10); of the loss 2 (y - p), 8 x 4, at most a few times over. Neither x, which
    # is the caller's, nor the weights again.
    assert 8 * 10 * 4 <= cost.activation_bytes < 8 * 10 * 4 + 3 * 8 * 4 * 4
    assert {t.shape for t in kept if t.op.type == "Relu"} == {(8, 10)}
    # Gradients are all there when what was kept is not any more.
    together = cost.gradient_bytes + cost.activation_bytes
    assert max(cost.gradient_bytes, cost.activation_bytes) <= cost.live_bytes <= together + 1024
    assert cost.memory_bytes == cost.weight_bytes + cost.state_bytes + cost.live_bytes


def test_memory_of_sharded_weights():
    """fc1 by columns, fc2 by rows: half of each weight, slot and hidden activation."""
    whole, _ = memory(Mesh.of([2]), tap.batch())
    half, _ = memory(
        Mesh.of([2]),
        tap.batch(),
        tap.shard("mlp/fc1/kernel", 1, "data"),
        tap.shard("mlp/fc2/kernel", 0, "data"),
    )
    assert half.weight_bytes == pytest.approx(WEIGHTS / 2)
    assert whole.state_bytes - half.state_bytes == pytest.approx(WEIGHTS / 2)
    assert whole.gradient_bytes - half.gradient_bytes == pytest.approx(WEIGHTS / 2)
    assert whole.activation_bytes - half.activation_bytes == pytest.approx(8 * 10 * 4 / 2)


def test_memory_counts_padding():
    # 10 columns among 3 ranks: 4 are stored.
    cost, _ = memory(Mesh.of([3]), tap.batch(), tap.shard("mlp/fc1/kernel", 1, "data"))
    kernels = 6 * 4 + (4 * 4 if cost.weight_bytes < (24 + 40) * 4 else 40)
    assert cost.weight_bytes == kernels * 4


def test_data_parallelism_halves_activations_alone():
    whole, _ = memory(Mesh.of([2]), tap.batch())
    half, _ = memory(Mesh.of([2]))
    assert (half.weight_bytes, half.state_bytes) == (whole.weight_bytes, whole.state_bytes)
    assert half.activation_bytes <= whole.activation_bytes / 2 + 16


def test_slots_that_the_graph_lacks_come_by_ratio():
    """Forward only; the update is said to be Adam's (two slots)."""
    plan = plan_from_constraints(mlp(), FOUR, [tap.batch()])
    partitioned = partition(mlp(), plan)
    roles = Roles.of(partitioned.graph)
    plain = evaluate(partitioned, CLUSTER, roles)
    adam = evaluate(partitioned, CLUSTER, roles, state_ratio=2.0)
    weights = (6 * 10 + 10 + 10 * 6 + 6 + 6 * 5 + 5) * 4
    assert plain.weight_bytes == adam.weight_bytes == weights
    assert (plain.state_bytes, adam.state_bytes) == (0, 2 * weights)
    assert plain.gradient_bytes == 0, "nothing is trained"
    # Adam's ops read and write arrays of the weights' size 30 times.
    assert update_seconds(weights, 2.0, CLUSTER) == pytest.approx(30 * weights * 1e-9)
    assert adam.compute_s[UPDATE] - plain.compute_s[UPDATE] == pytest.approx(30 * weights * 1e-9)
    assert adam.seconds - plain.seconds == pytest.approx(30 * weights * 1e-9)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_an_update_takes_as_long_as_its_ops(jit_compile):
    """Of Adam, on weights of which the time counts and not the start of the ops."""
    with tap.auto_parallel(tap.split([1])):
        model = keras.Sequential([keras.Input((64,)), layers.Dense(4096, use_bias=False)])
        model.compile("adam", "mse")
    data = np.zeros((1, 64), "float32"), np.zeros((1, 4096), "float32")
    step = parallel_model(model).step("train").capture(argument_specs((data,)))
    prepared = prepare_step(step)
    roles = Roles.of(step.graph, step.gradient_tensors, jit_compile=jit_compile)
    cluster = CLUSTER.with_device(launch_s=0.0)
    whole = propagate(
        prepared, Mesh.of([1]), plan_from_constraints(step.graph, Mesh.of([1])).anchors()
    )
    cost = evaluate(whole, cluster, roles)
    expected = update_seconds(64 * 4096 * 4, 2.0, cluster, fused=jit_compile)
    assert cost.compute_s[UPDATE] == pytest.approx(expected, rel=0.02)


def test_a_step_costs_what_starts_it():
    plan = plan_from_constraints(mlp(), FOUR, [tap.batch()])
    partitioned = partition(mlp(), plan)
    roles = Roles.of(partitioned.graph)
    plain = evaluate(partitioned, CLUSTER, roles)
    started = evaluate(partitioned, dataclasses.replace(CLUSTER, step_s=1e-3), roles)
    assert started.seconds == pytest.approx(plain.seconds + 1e-3)


def test_a_device_waits_for_a_host_that_issues_ops_more_slowly_than_it_runs_them():
    plan = plan_from_constraints(mlp(), FOUR)
    partitioned = partition(mlp(), plan)
    roles = Roles.of(partitioned.graph)
    plain = evaluate(partitioned, CLUSTER, roles)
    assert plain.host_wait_s == 0
    slow = evaluate(partitioned, CLUSTER.with_device(dispatch_s=1.0), roles)
    assert slow.compute_s == plain.compute_s and slow.exposed_s == plain.exposed_s
    assert slow.seconds == pytest.approx(plain.seconds + slow.host_wait_s)
    issued = round(slow.seconds)  # a second each, while the device computes
    assert slow.seconds == pytest.approx(issued, abs=0.1) and 10 < issued < 60
    ahead = evaluate(partitioned, CLUSTER.with_device(dispatch_s=plain.seconds / 9 / issued), roles)
    assert 1 < ahead.seconds / plain.seconds < 1.02
    compiled = Roles.of(partitioned.graph, jit_compile=True)
    machines = CLUSTER.with_device(dispatch_s=1.0, xla_dispatch_s=0.1)
    kernels = evaluate(partitioned, machines, compiled).seconds * 10
    assert kernels < 0.8 * issued, "elementwise ops of one kernel start once"


def test_in_one_memory_all_compute_together_what_is_alike():
    """Nothing is split: each of four ranks would compute and store the same."""
    plan = plan_from_constraints(mlp(), FOUR, [tap.batch()])
    partitioned = partition(mlp(), plan)
    roles = Roles.of(partitioned.graph)
    apart = CLUSTER.with_device(launch_s=0.0)
    each = evaluate(partitioned, apart, roles)
    together = evaluate(partitioned, dataclasses.replace(apart, one_memory=True), roles)
    assert together.seconds == pytest.approx(each.seconds / 4)
    assert together.memory_bytes == pytest.approx(each.memory_bytes / 4)
    batched = partition(mlp(), plan_from_constraints(mlp(), FOUR))
    roles = Roles.of(batched.graph)
    each = evaluate(batched, apart, roles)
    together = evaluate(batched, dataclasses.replace(apart, one_memory=True), roles)
    assert together.weight_bytes == pytest.approx(each.weight_bytes / 4)
    assert together.activation_bytes == each.activation_bytes
