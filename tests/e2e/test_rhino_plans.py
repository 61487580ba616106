"""Plans of Rhino's planner train as on one device: weights are split, and ops run as said."""

import functools

import keras
import numpy as np
import pytest
from keras import layers

import tfpar as tap
from benchmarks.models import SMALL, batch_of, compile_model
from tests.cases import is_nightly, nightly
from tests.e2e.test_searched_plans import COMPUTE_BOUND, MESH, split_weights
from tests.equivalence import assert_equivalent, assert_same, op_by_op, train
from tfpar.cluster import Cluster, Device, Level
from tfpar.planning.intra_op import RhinoPlanner
from tfpar.plans import Plan
from tfpar.spec import Shard

pytestmark = pytest.mark.xdist_group("rhino")  # `trained` once

BATCH = 8
SAMPLES = 2 * BATCH


class Fastest:
    """Rhino's planner where predictions are taken as exact: the fastest plan, not a simpler one."""

    name = "rhino"

    def solve(self, problem):
        return RhinoPlanner().solve(problem.with_objective(uncertainty=0.0))


FASTEST = Fastest()


def recurrent():
    words = keras.Input((6,), dtype="int32")
    x = layers.Embedding(60, 16)(words)
    x = layers.LSTM(16, return_sequences=True, use_cudnn=False)(x)
    x = layers.GRU(12, use_cudnn=False)(x)
    return keras.Model(words, layers.Dense(40)(x))


MODELS = {
    "gpt": lambda: SMALL["gpt"](vocabulary=60),
    "t5": lambda: SMALL["t5"](vocabulary=60),
    "gshard_moe": SMALL["gshard_moe"],
    "resnet": SMALL["resnet"],
    "wide": lambda: SMALL["wide"](classes=1000),
    "dnabert": SMALL["dnabert"],
    "unet": SMALL["unet"],
    "vgg": SMALL["vgg"],
    "wide_resnet": SMALL["wide_resnet"],
    "recurrent": recurrent,
}


def build(name):
    model = MODELS[name]()
    if name != "recurrent":
        return compile_model(model, "sgd")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, jit_compile=False)
    return model


def data_of(name):
    keras.utils.set_random_seed(0)
    if name != "recurrent":
        return batch_of(MODELS[name](), SAMPLES)
    rng = np.random.default_rng(0)
    return rng.integers(0, 60, (SAMPLES, 6)).astype("int32"), rng.integers(0, 40, SAMPLES)


@functools.cache
def trained(name):
    """(parallel, plain): trained with Rhino's plan, and on one device."""
    return assert_equivalent(
        lambda: build(name),
        data_of(name),
        MESH,
        planner=FASTEST,
        cluster=COMPUTE_BOUND,
        batch_size=BATCH,
    )


BY_DAY = ("gpt", "wide", "recurrent")


@pytest.mark.slow
@pytest.mark.parametrize("name", [n if n in BY_DAY else nightly(n) for n in MODELS])
def test_a_plan_of_rhino_trains_as_on_one_device(name):
    parallel, _ = trained(name)
    plan = tap.plan_of(parallel.model)
    assert plan.planner.startswith("rhino") and plan.cluster.name == COMPUTE_BOUND.name
    assert plan.mesh.size == 4
    for path, variable in plan.variables.items():
        if variable.spec is not None:
            assert parallel.specs()[path] == ",".join(map(str, variable.spec)), path


@pytest.mark.slow
def test_plans_split_weights_and_say_how_ops_run():
    names = MODELS if is_nightly() else BY_DAY
    plans = [tap.plan_of(trained(name)[0].model) for name in names]
    assert sum(bool(split_weights(plan)) for plan in plans) >= len(plans) / 2
    assert sum(len(plan.ops) for plan in plans) >= (100 if is_nightly() else 50)
    splitting = [
        op
        for plan in plans
        for op in plan.ops.values()
        if any(isinstance(p, Shard) for spec in op.in_specs for p in spec)
    ]
    assert len(splitting) >= (50 if is_nightly() else 30)


@pytest.mark.slow
def test_ops_run_as_the_plan_says():
    parallel, _ = trained("wide")
    plan = tap.plan_of(parallel.model)
    partitioned = parallel.executable().partitioned
    ran = {op.name: decision.strategy for op, decision in partitioned.decisions.items()}
    assert plan.ops and set(plan.ops) <= set(ran)
    for name, planned in plan.ops.items():
        assert ran[name].in_specs == planned.in_specs, name
        assert ran[name].out_specs == planned.made, name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wide", nightly("gpt")])
def test_a_saved_plan_trains_the_same(name, tmp_path):
    parallel, plain = trained(name)
    path = tmp_path / "plan.json"
    tap.plan_of(parallel.model).save(path)
    assert Plan.load(path).ops == tap.plan_of(parallel.model).ops
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(7)
    with tap.auto_parallel(plan=str(path)):
        model = build(name)
    model.set_weights(plain.start)
    x, y = data_of(name)
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    for got, want in zip(model.get_weights(), parallel.weights, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)
    assert not tap.plan_of(parallel.model).diff(tap.plan_of(model))


@pytest.mark.nightly
def test_a_batch_of_another_size_trains_as_on_one_device():
    """The last batch of an epoch: ops whose sizes are others run as they may."""
    x, y = data_of("gpt")
    data = x[: BATCH + 3], y[: BATCH + 3]
    parallel = train(
        lambda: build("gpt"),
        data,
        mesh=MESH,
        planner=FASTEST,
        cluster=COMPUTE_BOUND,
        batch_size=BATCH,
        start=trained("gpt")[1].start,
    )
    start = trained("gpt")[1].start
    plain = train(op_by_op(lambda: build("gpt")), data, batch_size=BATCH, start=start)
    assert_same(parallel, plain)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wide", nightly("gpt")])
def test_a_plan_of_ops_trains_in_chunks(name):
    _, plain = trained(name)
    parallel = train(
        lambda: build(name),
        data_of(name),
        mesh=MESH,
        planner=FASTEST,
        cluster=COMPUTE_BOUND,
        batch_size=BATCH,
        start=plain.start,
        options={"chunks": 2},
    )
    assert_same(parallel, plain)
    assert tap.plan_of(parallel.model).ops


def test_a_plan_on_three_axes_trains_as_on_one_device():
    """As a mesh whose axes are split in two has them, here given by a constraint."""

    def build():
        sizes = ("relu", 96), ("relu", 96), (None, 16)
        hidden = [layers.Dense(units, activation) for activation, units in sizes]
        model = keras.Sequential([keras.Input((32,)), *hidden])
        model.compile("adam", "mse")
        return model

    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(SAMPLES, n)).astype("float32") for n in (32, 16))
    slow = Device({"float32": 1e9}, 2**30, 1e9, 1e-7)
    links = [Level(2, 1e8, 1e-6), Level(2, 1e9, 1e-7), Level(2, 4e9, 1e-7)]
    parallel, _ = assert_equivalent(
        build,
        (x, y),
        {"data": 2, "d1": 2, "d2": 2},
        planner=FASTEST,
        cluster=Cluster.regular("slow", slow, links),
        constraints=[tap.batch("data")],
        batch_size=BATCH,
    )
    plan = tap.plan_of(parallel.model)
    split = {
        axis
        for variable in plan.variables.values()
        for axis, placement in enumerate(variable.spec or ())
        if isinstance(placement, Shard)
    }
    assert plan.mesh.shape == (2, 2, 2) and split >= {1, 2}


@pytest.mark.slow
def test_norms_are_split_along_the_sequence_unasked():
    """Megatron's sequence parallelism (Korthikanti et al., 2022), where one sequence is all there
    is: what lies between products whose weights are split is computed once, not by each rank."""

    def model():
        return compile_model(SMALL["gpt"](vocabulary=60), keras.optimizers.SGD(0.1, momentum=0.9))

    keras.utils.set_random_seed(0)
    parallel, _ = assert_equivalent(
        model, batch_of(model(), 2), [2], planner=FASTEST, cluster=COMPUTE_BOUND, batch_size=1
    )
    laid = parallel.executable().partitioned
    norms = {
        laid.specs[op.outputs[0]]
        for op in laid.graph.ops
        if op.type == "Rsqrt" and not op.name.startswith("gradient_tape")
    }
    assert norms and all(Shard(1) in spec for spec in norms)
    assert split_weights(tap.plan_of(parallel.model))
    assert {"all_gather", "reduce_scatter"} <= {kind for kind, _, _ in laid.collectives()}
