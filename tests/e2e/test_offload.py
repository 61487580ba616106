"""What lies in host memory between its uses: the same numbers, from less memory of the device."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import keras
import numpy as np
import pytest
from keras import layers

import tfpar as tap
from tests.cases import nightly
from tests.e2e.test_recompute import CASES, gpt, normalized, tokens
from tests.e2e.test_recompute import numbers as rows
from tests.equivalence import Trained, assert_same, op_by_op, traced, train
from tests.planning.problems import Captured
from tfpar.cluster import Cluster, Device, Level
from tfpar.compile.local import MUST_COMPILE
from tfpar.ir import BACKWARD, FORWARD, Roles, traits
from tfpar.planning import find_plan
from tfpar.planning.intra_op import find_planner
from tfpar.plans import OffloadPlan, Plan
from tfpar.spec import ArgumentError, PlanError, SpecError, TfparError

SLOTS = tap.Offload(optimizer=True)


def perceptron(optimizer=lambda: keras.optimizers.Adam(0.01)) -> keras.Model:
    hidden = [layers.Dense(12, "tanh", name=f"dense_{i}") for i in range(3)]
    model = keras.Sequential([keras.Input((6,)), *hidden, layers.Dense(2, name="head")])
    model.compile(optimizer(), "mse", jit_compile=False)
    return model


def numbers(n: int = 16) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(n, 6)).astype("float32"), rng.normal(size=(n, 2)).astype("float32")


def on_host(run: Trained) -> list:
    return [
        op for g in run.executable().local.graphs() for op in g.ops if op.attrs.get(traits.ON_HOST)
    ]


def devices_of(run: Trained) -> dict[str, set[str]]:
    """By name, where the shards of each variable lie."""
    return {
        v.name.partition(":")[0]: {s.device.rpartition("/")[2] for s in v.shards.values()}
        for v in run.executable().captured.variables
    }


def trained(build, data, mesh, start, options=None, constraints=()) -> Trained:
    return train(
        build, data, mesh=tap.split(mesh), start=start, options=options, constraints=constraints
    )


OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.AdamW(0.01, amsgrad=True, global_clipnorm=1.0),
    "adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "average": lambda: keras.optimizers.RMSprop(0.01, use_ema=True, ema_momentum=0.9),
    "accumulating": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Lion(0.01)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [n if n == "adafactor" else nightly(n) for n in OPTIMIZERS])
def test_slots_in_host_memory_change_no_number(name):
    def build() -> keras.Model:
        return perceptron(OPTIMIZERS[name])

    plain = train(op_by_op(build), numbers())
    stored, found = (
        trained(build, numbers(), [2], plain.start, options) for options in ({}, {"offload": SLOTS})
    )
    assert_same(found, plain)
    assert found.losses == stored.losses
    for got, wanted in zip(found.weights, stored.weights, strict=True):
        np.testing.assert_array_equal(got, wanted)
    for got, wanted in zip(
        found.model.optimizer.variables, stored.model.optimizer.variables, strict=True
    ):
        np.testing.assert_array_equal(got.numpy(), wanted.numpy())
    assert on_host(found) and not on_host(stored)


@functools.cache
def adam(mesh: tuple[int, ...] = (2,)) -> tuple[Trained, Trained]:
    """Trained plainly, and with slots in host memory."""
    plain = train(op_by_op(perceptron), numbers())
    return plain, trained(perceptron, numbers(), mesh, plain.start, {"offload": SLOTS})


@pytest.mark.slow
def test_slots_lie_with_the_first_cpu_and_weights_with_their_ranks():
    split = [tap.shard(".*dense_1/kernel", 1, "model")]
    plain = adam()[0]
    run = trained(perceptron, numbers(), [1, 2], plain.start, {"offload": SLOTS}, split)
    assert_same(run, plain)
    places = devices_of(run)
    kernel = next(name for name in places if name.endswith("dense_1/kernel"))
    assert places[kernel] == {"device:CPU:0", "device:CPU:1"}
    slots = [n for n in places if n.endswith(("_momentum", "_velocity"))]
    assert len(slots) == 16 and all(places[name] == {"device:CPU:0"} for name in slots)


@pytest.mark.slow
def test_each_slot_is_read_once_and_written_once():
    graph = adam()[1].executable().local.graph
    slots = [v.handle for v in graph.variables if v.on_host]
    readers = graph.consumers()
    for handle in slots:
        types = [op.type for op in readers[handle]]
        assert types == ["ReadVariableOp", "AssignVariableOp"]
        assert all(op.attrs[traits.ON_HOST] for op in readers[handle])


@pytest.mark.slow
def test_slots_come_when_their_gradient_is_there_and_few_at_a_time():
    graph = adam()[1].executable().local.graph
    reads = [op for op in graph.ops if op.attrs.get(traits.ON_HOST) and op.type == "ReadVariableOp"]
    weights = 8
    assert len(reads) == 2 * weights
    assert all(any("gradient_tape" in c.name for c in op.control) for op in reads)
    waiting = [op for op in reads if any(c.type == "AssignVariableOp" for c in op.control)]
    assert len(waiting) == 2 * (weights - traits.IN_FLIGHT)
    for op in waiting:
        stored = [c for c in op.control if c.type == "AssignVariableOp"]
        assert len(stored) == 2 and op.inputs[0] not in {c.inputs[0] for c in stored}


@pytest.mark.slow
def test_rows_of_an_embedding():
    """Their gradient is sparse."""

    def build() -> keras.Model:
        table = layers.Embedding(20, 8, name="table")
        model = keras.Sequential([keras.Input((4,)), table, layers.Flatten(), layers.Dense(2)])
        model.compile(keras.optimizers.Adam(0.05), "mse", jit_compile=False)
        return model

    ids = np.random.default_rng(0).integers(0, 20, (16, 4)).astype("int32")
    data = ids, numbers(16)[1]
    plain = train(op_by_op(build), data)
    run = trained(build, data, [2], plain.start, {"offload": tap.Offload(optimizer="table/.*")})
    assert_same(run, plain)
    names = [v.name for v in run.executable().partitioned.graph.variables if v.on_host]
    assert len(names) == 2 and all("table_embeddings" in name for name in names)


@pytest.mark.slow
@pytest.mark.parametrize(
    "pipeline",
    [
        nightly(tap.Pipeline(microbatches=3)),
        nightly(tap.Pipeline(2, 2)),
        tap.Pipeline(2, 2, "zb-h1"),
    ],
    ids=str,
)
def test_microbatches_and_stages(pipeline):
    plain = adam()[0]
    options = {"offload": SLOTS, "pipeline": pipeline}
    run = trained(perceptron, numbers(), [2], plain.start, options)
    assert_same(run, plain)
    assert len([op for op in on_host(run) if op.type == "AssignVariableOp"]) == 16


@pytest.mark.slow
def test_chunks():
    plain = adam()[0]
    run = trained(perceptron, numbers(), [2], plain.start, {"offload": SLOTS, "chunks": 2})
    assert_same(run, plain)
    assert len([op for op in on_host(run) if op.type == "ReadVariableOp"]) == 16


def compiled(build: Callable[[], keras.Model]) -> Callable[[], keras.Model]:
    """`build` with steps that XLA compiles."""

    def built() -> keras.Model:
        model = build()
        model.jit_compile = True
        return model

    return built


def assert_compiled_around_hosts(run: Trained) -> None:
    """XLA compiles something, and none of what runs on hosts."""
    graph = run.executable().local.graph
    assert any(op.attrs.get(MUST_COMPILE) for op in graph.ops)
    assert any(op.attrs.get(traits.ON_HOST) for op in graph.ops)
    bodies = [op for body in graph.functions.values() for op in body.ops]
    assert bodies and not any(op.attrs.get(traits.ON_HOST) for op in bodies)


@pytest.mark.slow
def test_xla_compiles_what_lies_between():
    build = compiled(perceptron)
    plain = train(traced(build), numbers())
    run = trained(build, numbers(), [2], plain.start, {"offload": SLOTS})
    assert_same(run, plain)
    assert_compiled_around_hosts(run)
    assert len(on_host(run)) == 32


@pytest.mark.slow
def test_checkpoints_keep_slots(tmp_path):
    plain, run = adam()
    tap.save_checkpoint(run.model, tmp_path)
    with tap.auto_parallel(tap.split([2]), planner=None, offload=SLOTS):
        other = perceptron()
    other.fit(*numbers(), batch_size=8, verbose=0)
    tap.restore_checkpoint(other, tmp_path)
    for got, wanted in zip(other.optimizer.variables, plain.model.optimizer.variables, strict=True):
        np.testing.assert_allclose(got.numpy(), wanted.numpy(), rtol=1e-3, atol=1e-6)
    histories = [
        m.fit(*numbers(), batch_size=8, verbose=0, shuffle=False) for m in (other, run.model)
    ]
    assert histories[0].history == histories[1].history


# --- activations ----------------------------------------------------------------------------------

BLOCKS = tap.Offload(activations=True)


@functools.cache
def kept(case: str) -> tuple[Trained, Trained, Trained]:
    """A case on one device, and on a mesh with activations on devices and on hosts."""
    build, data, mesh, constraints = CASES[case]
    plain = train(op_by_op(build), data())
    stored, away = (
        trained(build, data(), mesh, plain.start, options, constraints)
        for options in ({}, {"offload": BLOCKS})
    )
    return plain, stored, away


def copies(run: Trained) -> tuple[list, list]:
    """The ops that take activations to the host, and those that give them back."""
    graph = run.executable().partitioned.graph
    found = [op for op in graph.ops if op.attrs.get(traits.ON_HOST) and op.type == "Identity"]
    return tuple(
        [op for op in found if op.attrs[traits.ON_HOST] == side]
        for side in (traits.TAKES, traits.GIVES)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["data parallel", *(nightly(c) for c in CASES if c != "data parallel")]
)
def test_activations_in_host_memory_change_no_number(case):
    plain, stored, away = kept(case)
    assert_same(away, plain)
    np.testing.assert_allclose(away.losses, stored.losses, rtol=1e-6)
    for got, wanted in zip(away.weights, stored.weights, strict=True):
        # TensorFlow fuses ops of which nothing but the end is read: they round differently.
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    down, back = copies(away)
    assert len(down) == len(back) > 4 and copies(stored) == ([], [])


@pytest.mark.slow
def test_activations_go_once_and_come_back_when_the_backward_pass_is_near():
    away = kept("data parallel")[2]
    down, back = copies(away)
    graph = away.executable().partitioned.graph
    readers, roles = graph.consumers(), Roles.of(graph)
    assert {r for op in down for r in readers[op.outputs[0]]} == {*back}
    for op in down:  # nothing of the backward pass holds on to what has left
        views = [op.inputs[0]]
        while views:
            view = views.pop()
            for reader in readers[view]:
                assert reader is op or roles.phase[reader] == FORWARD or reader.type in traits.SIZES
                views += reader.outputs if reader.type in traits.VIEWS and reader is not op else []
    position = {op: i for i, op in enumerate(graph.ops)}
    first = min(position[op] for op in graph.ops if roles.phase[op] == BACKWARD)
    for op in back:
        (awaited,) = op.control
        assert roles.phase[awaited] == BACKWARD and first <= position[awaited] < position[op]
        assert all(roles.phase[reader] == BACKWARD for reader in readers[op.outputs[0]])
    local = [op for op in on_host(away) if op.attrs[traits.ON_HOST] == traits.GIVES]
    assert len(local) == len(back) and all(op.control for op in local)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        nightly({"pipeline": tap.Pipeline(microbatches=2)}),
        nightly({"pipeline": tap.Pipeline(2, 2)}),
        {"pipeline": tap.Pipeline(2, 2, "zb-h1")},
        nightly({"chunks": 2}),
        nightly({"recompute": ["block_1"]}),
    ],
    ids=str,
)
def test_activations_in_all_ways_to_run(options):
    plain = kept("data parallel")[0]
    run = trained(gpt, tokens(), [2], plain.start, {"offload": True, **options})
    assert_same(run, plain)
    assert any(op.type == "Identity" for op in on_host(run))


@pytest.mark.nightly
def test_xla_compiles_around_activations():
    build = compiled(gpt)
    plain = train(traced(build), tokens())
    run = trained(build, tokens(), [2], plain.start, {"offload": BLOCKS})
    assert_same(run, plain)
    assert_compiled_around_hosts(run)


@pytest.mark.slow
def test_blocks_are_chosen_by_name(tmp_path):
    def found(activations) -> Plan:
        with tap.auto_parallel([2], planner=None, offload=tap.Offload(activations=activations)):
            model = normalized()
        model.fit(*rows(8), batch_size=8, verbose=0)
        return tap.plan_of(model)

    plan = found(["block_1"])
    assert plan.offloaded == OffloadPlan((), ("block_1",))
    assert "backward pass: what 1 block (block_1) keep" in plan.summary()
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert not loaded.diff(plan) and loaded.offloaded == plan.offloaded
    without = dataclasses.replace(plan, offloaded=OffloadPlan())
    assert "activations of block_1: in host memory" in without.diff(plan)
    with pytest.raises(SpecError, match=r"activations='layer_.' matches no block .* 'block_0'"):
        found("layer_.")
    wrong = dataclasses.replace(plan, offloaded=OffloadPlan((), ("layer_0",)))
    with tap.auto_parallel([2], plan=wrong):
        model = normalized()
    with pytest.raises(PlanError, match="has in host memory what 'layer_0' keeps .* no such block"):
        model.fit(*rows(8), batch_size=8, verbose=0)


# --- plans and what is asked ----------------------------------------------------------------------


def plan_of(offload, optimizer=lambda: keras.optimizers.Adam(0.01)) -> Plan:
    with tap.auto_parallel([2], planner=None, offload=offload):
        model = perceptron(optimizer)
    model.fit(*numbers(8), batch_size=8, verbose=0)
    return tap.plan_of(model)


@pytest.mark.slow
def test_a_plan_says_what_lies_in_host_memory(tmp_path):
    assert not plan_of(None).offloaded and not plan_of(False).offloaded
    plan = plan_of(tap.Offload(optimizer=["dense_[01]/kernel"]))
    assert [name.rpartition("dense_")[2] for name in plan.offloaded.slots] == [
        "0/kernel",
        "1/kernel",
    ]
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.offloaded == plan.offloaded
    with tap.auto_parallel(plan=loaded):
        model = perceptron()
    model.fit(*numbers(8), batch_size=8, verbose=0)
    found = tap.plan_of(model)
    partitioned = found.partitioned
    assert sum(v.on_host for v in partitioned.graph.variables) == 4
    assert "Optimizer slots in host memory: those of 2 weights" in found.summary()
    assert "slots lie in host memory between their uses" in found.explain("dense_0/kernel")
    assert "in host memory" not in found.explain("dense_2/kernel")
    name = plan.offloaded.slots[0]
    without = dataclasses.replace(plan, offloaded=OffloadPlan())
    assert f"slots of {name}: in host memory" in without.diff(plan)
    assert f"slots of {name}: back on the device" in plan.diff(without)
    with pytest.raises(PlanError, match="offloads slots of variables that it does not have: 'no'"):
        dataclasses.replace(plan, offloaded=OffloadPlan(("no",)))


def test_an_optimizer_without_slots_has_nothing_to_offload():
    assert not plan_of(True, lambda: keras.optimizers.SGD(0.1)).offloaded.slots


@pytest.mark.slow
def test_what_cannot_be_offloaded():
    with pytest.raises(ArgumentError, match="Offload's optimizer is 3"):
        tap.Offload(optimizer=3)
    with pytest.raises(SpecError, match=r"optimizer='\('.* not a regular expression"):
        tap.Options(offload=tap.Offload(optimizer="("))
    with pytest.raises(SpecError, match="'nothing'. matches no weight that has optimizer slots"):
        plan_of(tap.Offload(optimizer=["nothing"]))
    plan = plan_of(None)
    with pytest.raises(TfparError, match="a plan or offload, not both"):
        tap.auto_parallel([2], plan=plan, offload=True)


# --- chosen for memory ----------------------------------------------------------------------------


def machines(memory_bytes: float, bandwidth: float) -> Cluster:
    """One device with such a link to its host."""
    fast = Device({"float32": 1e12}, memory_bytes, 1e12, host_bandwidth=bandwidth, host_latency_s=0)
    return Cluster.regular("small", fast, [Level(1, 1e8, 1e-5)])


@pytest.mark.nightly
def test_the_link_to_the_host_decides_whether_slots_leave_or_blocks_are_computed_again():
    def adam() -> keras.Model:
        model = gpt(4)
        model.compile(keras.optimizers.Adam(1e-3), model.loss, jit_compile=False)
        return model

    captured = Captured.of(adam, 8)
    ample = find_plan(captured.problem([1], machines(1e12, 1e13)), find_planner("tap"))
    assert not ample.offloaded and not ample.recompute

    def found(part: float, bandwidth: float) -> Plan:
        limit = part * ample.cost.memory_bytes
        plan = find_plan(captured.problem([1], machines(limit, bandwidth)), find_planner("tap"))
        assert plan.cost.memory_bytes <= limit
        return plan

    quick, slow = found(0.9, 1e13), found(0.9, 1e6)
    assert quick.offloaded.slots and not quick.offloaded.activations and not quick.recompute
    assert slow.recompute and not slow.offloaded
    assert ample.cost.seconds < quick.cost.seconds < slow.cost.seconds
    quick, slow = found(0.6, 1e13), found(0.6, 1e6)
    assert len(quick.offloaded.activations) == 4 and not quick.recompute
    assert slow.recompute and not slow.offloaded
    assert ample.cost.seconds < quick.cost.seconds < slow.cost.seconds
    assert quick.cost.activation_bytes < 0.5 * ample.cost.activation_bytes
    problem = captured.problem([1], machines(0.6 * ample.cost.memory_bytes, 1e6))
    never = find_plan(problem.with_storage(recompute=False), find_planner("tap"))
    assert len(never.offloaded.activations) == 4 and not never.recompute
