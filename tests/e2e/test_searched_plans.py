"""Plans that the search chose train as on one device."""

import keras
import numpy as np
import pytest

import tfpar as tap
from benchmarks.models import SMALL, batch_of, compile_model
from tests.cases import nightly
from tests.clusters import device, two_levels
from tests.equivalence import assert_equivalent
from tfpar.cluster import Link
from tfpar.spec import Shard
from tfpar.tf.keras import parallel_model

MESH = tap.split([2, 2])

# Slow devices on fast links: whatever splits work pays.
COMPUTE_BOUND = two_levels(
    "compute", 2, 2, device(1e8, 1e8, 1e12, 1e9, 0.0), Link(1e12, 1e-9), Link(1e12, 1e-9)
)
# With the memory that `TIGHT_BYTES` leaves, a step of one stage and one microbatch has to split
# weights. Microbatches or stages, which meet the limit too, are left out by `WHOLE`.
TIGHT = two_levels(
    "tight", 1, 4, device(1e12, 1e12, 1e12, 1e12, 0.0), Link(1e10, 1e-6), Link(1e10, 1e-6)
)
WHOLE = tap.Pipeline(stages=1, microbatches=1)
# Case and optimizer -> 1.25 times what such a plan needs at least (`needed_bytes` of the error
# under a limit of one byte). Too little is refused; too much splits nothing.
TIGHT_BYTES = {("gpt", "sgd"): 398_280, ("wide", "sgd"): 5_436_110, ("wide", "adam"): 10_851_730}


CASES = {
    "gpt": lambda: SMALL["gpt"](vocabulary=60),
    "t5": lambda: SMALL["t5"](vocabulary=60),
    "gshard_moe": SMALL["gshard_moe"],
    "resnet": SMALL["resnet"],
    "wide": lambda: SMALL["wide"](classes=1000),
}


def searched(case, cluster, batch=8):
    def build():
        model = CASES[case]()
        return compile_model(model, "sgd")

    keras.utils.set_random_seed(0)
    data = batch_of(CASES[case](), 2 * batch)
    options = {}
    if cluster is TIGHT:
        cluster = TIGHT.with_memory(TIGHT_BYTES[case, "sgd"])
        options["pipeline"] = WHOLE
    return assert_equivalent(
        build, data, MESH, planner="tap", cluster=cluster, batch_size=batch, options=options
    )


def split_weights(plan):
    return [
        name
        for name, v in plan.variables.items()
        if v.trainable and any(isinstance(p, Shard) for p in v.spec or ())
    ]


RUNS = [
    nightly("gpt", COMPUTE_BOUND),
    nightly("gshard_moe", COMPUTE_BOUND),
    nightly("wide", COMPUTE_BOUND),
    nightly("gpt", TIGHT),
    ("wide", TIGHT),
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "cluster"), RUNS, ids=lambda v: getattr(v, "name", v))
def test_a_searched_plan_trains_as_on_one_device(case, cluster):
    parallel, _ = searched(case, cluster)
    plan = tap.plan_of(parallel.model)
    assert plan.planner == "tap" and plan.cluster.name == cluster.name
    if cluster is TIGHT:
        assert plan.cost.memory_bytes <= plan.cluster.device.memory_bytes
        assert split_weights(plan) or plan.recompute
    for name, variable in plan.variables.items():
        if variable.spec is not None:
            assert parallel.specs()[name] == ",".join(map(str, variable.spec)), name


@pytest.mark.slow
def test_without_anything_said_the_machine_is_detected():
    parallel, _ = searched("wide", None)
    plan = tap.plan_of(parallel.model)
    assert plan.cluster.name == "cpu" and plan.mesh.size == 4
    assert "Predicted" in plan.summary()


@pytest.mark.slow
def test_all_steps_of_a_model_run_with_the_plan_of_its_training():
    keras.utils.set_random_seed(0)
    build = lambda: compile_model(CASES["wide"]())  # noqa: E731
    cluster = TIGHT.with_memory(TIGHT_BYTES["wide", "adam"])
    with tap.auto_parallel(MESH, planner="tap", cluster=cluster, pipeline=WHOLE):
        model = build()
    x, y = batch_of(model, 8)
    before = model.predict(x, batch_size=8, verbose=0)
    plain = keras.models.clone_model(model)
    plain.set_weights(model.get_weights())
    np.testing.assert_allclose(plain.predict(x, batch_size=8, verbose=0), before, atol=1e-5)
    model.fit(x, y, batch_size=8, verbose=0)
    plan = tap.plan_of(model)
    model.evaluate(x, y, batch_size=8, verbose=0)
    model.predict(x, batch_size=8, verbose=0)
    for kind in ("train", "test", "predict"):
        partitioned = parallel_model(model).executables[kind].partitioned
        assert partitioned.mesh == plan.mesh, kind
        for variable, spec in partitioned.variable_specs.items():
            known = plan.variables[variable.name].spec if variable.trainable else None
            assert known is None or known == spec, (kind, variable.name)


@pytest.mark.slow
def test_models_of_one_session_share_a_mesh():
    keras.utils.set_random_seed(0)
    with tap.auto_parallel(MESH, cluster=COMPUTE_BOUND):
        shared = keras.layers.Dense(16, "relu", name="shared")
        inputs = keras.Input((8,))
        first = keras.Model(inputs, keras.layers.Dense(4, name="a")(shared(inputs)))
        second = keras.Model(inputs, keras.layers.Dense(6, name="b")(shared(inputs)))
        for model in (first, second):
            model.compile("sgd", "mse", jit_compile=False)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 8)).astype("float32")
    first.fit(x, x[:, :4], verbose=0)
    second.fit(x, x[:, :6], verbose=0)
    one, other = tap.plan_of(first), tap.plan_of(second)
    assert one.mesh == other.mesh
    assert one.variables["shared/kernel"].spec == other.variables["shared/kernel"].spec


@pytest.mark.slow
def test_gradients_travel_in_buckets_of_the_size_that_cost_least():
    cluster = two_levels(
        "latency-free", 1, 4, device(1e9, 1e9, 1e12, 1e12, 0.0), Link(1e9, 0.0), Link(1e9, 0.0)
    )
    keras.utils.set_random_seed(0)
    constraints = [tap.batch("data"), tap.replicate(".*kernel")]
    with tap.auto_parallel([4], constraints, planner="tap", cluster=cluster):
        inputs = keras.Input((256,))
        x = inputs
        for i in range(4):
            x = keras.layers.Dense(512, name=f"fc{i}", use_bias=False)(x)
        model = keras.Model(inputs, x)
        model.compile("sgd", "mse", jit_compile=False)
    data = np.zeros((8, 256), "float32"), np.zeros((8, 512), "float32")
    model.fit(*data, verbose=0)
    plan = tap.plan_of(model)
    assert plan.cost.bucket_bytes == 1024 * 1024  # the least there is: starting one costs nothing
    packed = parallel_model(model).executables["train"].packed_bytes
    assert max(packed) <= plan.cost.bucket_bytes and len(packed) > 1


@pytest.mark.slow
def test_lists_that_a_loop_walks_are_made_anew_where_the_search_wants_them_otherwise():
    def build():
        words, facts = keras.Input((6,), dtype="int32"), keras.Input((5,))
        read = keras.layers.GRU(8)(keras.layers.Embedding(300, 8)(words))
        h = keras.layers.Concatenate()([read, keras.layers.Dense(8)(facts)])
        model = keras.Model([words, facts], keras.layers.Dense(70)(h))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adamw", loss, jit_compile=False)
        return model

    rng = np.random.default_rng(0)
    data = [rng.integers(0, 300, (16, 6)), rng.normal(size=(16, 5))], rng.integers(0, 70, 16)
    parallel, _ = assert_equivalent(build, data, tap.split([2]), planner="tap", batch_size=8)
    assert tap.plan_of(parallel.model).findings.layouts
