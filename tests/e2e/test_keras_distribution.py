"""`keras.distribution` on TensorFlow: what is in force when a model is built is the request."""

import concurrent.futures
import contextlib
import socket
import subprocess
import sys

import keras
import numpy as np
import pytest
from keras.distribution import DataParallel, DeviceMesh, LayoutMap, ModelParallel, TensorLayout

import tfpar as tap
from tests.equivalence import assert_same, op_by_op, train
from tests.time_limits import time_limit
from tfpar.spec import ArgumentError, SpecError, TfparError
from tfpar.tf.keras import parallel_model

rng = np.random.default_rng(0)
DATA = rng.normal(size=(16, 8)).astype("float32"), rng.normal(size=(16, 4)).astype("float32")


def build() -> keras.Model:
    return compiled(keras.layers.Dense(4, name="fc2"))


def compiled(*last: keras.layers.Layer) -> keras.Model:
    first = keras.layers.Dense(16, "relu", name="fc1")
    model = keras.Sequential([keras.Input((8,)), first, *last], name="mlp")
    model.compile("adam", "mse")
    return model


def device_mesh(shape=(2, 2), names=("data", "model")) -> DeviceMesh:
    return DeviceMesh(shape, names, [f"cpu:{i}" for i in range(int(np.prod(shape)))])


def by_columns(mesh: DeviceMesh | None = None, **layouts) -> ModelParallel:
    """A distribution that splits `fc1` by columns."""
    layout_map = LayoutMap(mesh or device_mesh())
    layout_map[".*fc1.*kernel"] = (None, "model")
    for pattern, axes in layouts.items():
        layout_map[pattern] = axes
    return ModelParallel(layout_map=layout_map, batch_dim_name="data")


@pytest.fixture
def in_force():
    """Sets a distribution for the rest of a test."""
    yield keras.distribution.set_distribution
    keras.distribution.set_distribution(None)


@pytest.fixture(scope="module")
def plain():
    return train(op_by_op(build), DATA)


def test_a_model_that_is_built_while_one_is_in_force_runs_on_its_mesh(in_force, plain):
    in_force(by_columns())
    trained = train(build, DATA)
    assert_same(trained, plain)
    assert tap.plan_of(trained.model).mesh == tap.split({"data": 2, "model": 2})
    assert trained.specs()["mlp/fc1/kernel"] == "R,S(1)"
    session = parallel_model(trained.model).session
    assert session.options.planner is None, "what it does not name is not searched"


def test_a_scope_ends(plain):
    with by_columns().scope():
        inside = build()
    assert parallel_model(inside) is not None and parallel_model(build()) is None


def test_data_parallel_splits_the_batch_alone(in_force, plain):
    in_force(DataParallel(devices=["cpu:0", "cpu:1"]))
    trained = train(build, DATA)
    assert_same(trained, plain)
    assert tap.plan_of(trained.model).batch_axes == ("batch",)
    assert set(trained.specs().values()) == {"R"}


def test_models_of_one_distribution_are_of_one_session(in_force):
    distribution = by_columns()
    in_force(distribution)
    one = build()
    with by_columns().scope():
        other = build()
    again = build()
    sessions = [parallel_model(model).session for model in (one, other, again)]
    assert sessions[0] is sessions[2] is not sessions[1]


def test_weights_are_never_whole_on_one_device(in_force):
    in_force(by_columns())
    layer = keras.layers.Dense(16)
    layer.build((None, 8))
    assert type(layer.kernel.value).__name__ == "ParallelVariable"


def test_outputs_of_layers_are_laid_out(in_force, plain):
    in_force(by_columns(**{".*fc1.*output": ("data", "model"), ".*fc2/output": (None, None)}))
    trained = train(build, DATA)
    assert_same(trained, plain)
    plan = tap.plan_of(trained.model)
    laid = {str(spec) for spec in map(",".join, (map(str, s) for s in plan.tensors.values()))}
    assert laid == {"S(0),S(1)", "R,R"}


class Columns(keras.layers.Layer):
    def call(self, x):
        return keras.distribution.distribute_tensor(x, TensorLayout(("data", "model")))


def test_distribute_tensor_in_a_model_places_it(in_force, plain):
    in_force(by_columns())
    trained = train(lambda: compiled(Columns(), keras.layers.Dense(4, name="fc2")), DATA)
    assert_same(trained, plain)
    assert list(map(str, *tap.plan_of(trained.model).tensors.values())) == ["S(0)", "S(1)"]


def test_a_value_outside_of_a_step_is_as_it_was():
    layout = TensorLayout(("data", None), device_mesh())
    value = keras.ops.ones((4, 2))
    assert keras.distribution.distribute_tensor(value, layout) is value


def test_layouts_as_the_backend_has_them():
    mesh = device_mesh()
    assert mesh.backend_mesh == tap.split({"data": 2, "model": 2})
    layout = TensorLayout((None, "model"), mesh)
    assert layout.backend_layout == (tap.Replicate(), tap.Shard(1))
    with pytest.raises(ValueError, match="device mesh is not set"):
        _ = TensorLayout((None, "model")).backend_layout


@pytest.mark.parametrize("where", ["mesh", "constraints", "both"])
def test_a_distribution_is_taken_for_a_mesh_and_for_constraints(where):
    asked = by_columns()
    given = {
        "mesh": {"mesh": asked},
        "constraints": {"constraints": asked},
        "both": {"mesh": asked.device_mesh, "constraints": asked},
    }[where]
    with tap.auto_parallel(**given) as session:
        pass
    assert session.mesh == tap.split({"data": 2, "model": 2})
    assert [str(c) for c in session.options.constraints] == [
        "batch('data')",
        "layout '.*fc1.*kernel': (None, 'model')",
    ]
    assert session.options.planner is None


def test_a_device_mesh_and_a_layout_map_are_taken_too():
    layouts = LayoutMap(device_mesh())
    layouts[".*fc1/kernel"] = (None, "model")
    for given in ({"mesh": layouts}, {"constraints": layouts}, {"mesh": device_mesh()}):
        with tap.auto_parallel(**given) as session:
            pass
        assert session.mesh == tap.split({"data": 2, "model": 2})
        assert session.options.planner is not None, "what they leave open is searched"


def test_a_planner_that_is_asked_for_searches_the_rest():
    with tap.auto_parallel(by_columns(), planner="tap") as session:
        pass
    assert session.options.planner.name == "tap"


def test_meshes_that_differ_are_an_error():
    with pytest.raises(ArgumentError, match=r"mesh is data=4, but .* data=2 x model=2"):
        tap.auto_parallel(tap.split([4]), by_columns())


def test_a_block_may_say_what_the_distribution_says(in_force):
    asked = by_columns()
    in_force(asked)
    for given in ((), (asked,), (asked.device_mesh, asked)):
        with tap.auto_parallel(*given, verbose=0) as session:
            pass
        assert session.mesh == tap.split({"data": 2, "model": 2})
        assert len(session.options.constraints) == 2 and not session.options.verbose


def test_two_requests_that_differ_are_an_error(in_force):
    in_force(by_columns())
    with pytest.raises(ArgumentError, match=r"Two requests differ: .* data=2 x model=2 .* data=4 "):
        tap.auto_parallel(tap.split([4]))
    model = build()
    with pytest.raises(ArgumentError, match="Two requests differ"):
        tap.parallelize(
            model, tap.split({"data": 2, "model": 2}), tap.shard("fc1/kernel", 0, "model")
        )
    in_force(tap.AutoParallel(tap.split([2])))
    with pytest.raises(ArgumentError, match=r"AutoParallel is the distribution in force"):
        tap.auto_parallel(tap.split([2]))


def test_a_distribution_inside_of_a_block_has_to_be_the_same():
    with tap.auto_parallel(tap.split([4])), by_columns().scope():
        with pytest.raises(ArgumentError, match=r"Two requests differ: .* for the mesh data=4 "):
            build()
    with tap.auto_parallel(by_columns(), verbose=0) as session, by_columns().scope():
        assert parallel_model(build()).session is session


class Foreign(DataParallel.__base__):
    pass


def test_a_distribution_of_another_kind_is_refused(in_force):
    in_force(Foreign(device_mesh()))
    with pytest.raises(ArgumentError, match=r"cannot tell what a Foreign asks for"):
        build()


def test_devices_out_of_order_are_refused():
    mesh = DeviceMesh((2,), ("data",), ["cpu:1", "cpu:0"])
    with pytest.raises(SpecError, match=r"order of their numbers.*\['cpu:1', 'cpu:0'\]"):
        tap.auto_parallel(mesh)


@pytest.mark.slow
def test_auto_parallel_as_a_distribution_finds_a_plan(in_force, plain):
    auto = tap.AutoParallel(tap.split([2, 2]), tap.batch("data"), verbose=0)
    in_force(auto)
    assert auto.plan is None and auto.device_mesh.shape == (2, 2)
    trained = train(build, DATA)
    assert_same(trained, plain)
    assert auto.plan.variables == tap.plan_of(trained.model).variables
    assert auto.get_data_layout((16, 8)).axes == ("data", None)
    assert auto.num_model_replicas == 2
    kernel = trained.model.layers[0].kernel
    spec = trained.specs()["mlp/fc1/kernel"].split(",")[1]
    dim = int(spec[2]) if spec != "R" else None
    axes = auto.get_variable_layout(kernel).axes
    assert axes == tuple("model" if d == dim else None for d in range(2))


def test_arguments_of_auto_parallel_are_checked_at_once():
    with pytest.raises(ArgumentError, match="planner"):
        tap.AutoParallel(planner="nobody's")


def test_addresses_that_are_not_one_for_each_process_are_refused():
    initialize = keras.distribution.initialize
    with pytest.raises(ArgumentError, match=r"process_id is one of 0\.\.1"):
        initialize("10.0.0.1:1234,10.0.0.2:1234", 2, 2)
    with pytest.raises(ArgumentError, match="has 1 addresses, and num_processes is 2"):
        initialize("10.0.0.1:1234", 2, 0)


def printed(code: str) -> str:
    """What a process of its own prints that runs this code."""
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=time_limit(120))
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.slow
def test_processes_join_by_their_addresses():
    with contextlib.ExitStack() as open_sockets:
        sockets = [open_sockets.enter_context(socket.socket()) for _ in range(2)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        addresses = ",".join(f"127.0.0.1:{one.getsockname()[1]}" for one in sockets)
    code = (
        "import keras, numpy as np, tfpar as tap\n"
        "from keras.distribution import DataParallel, initialize, list_devices\n"
        "initialize({addresses!r}, 2, {process})\n"
        "try:\n"
        "    initialize({addresses!r}, 2, {other})\n"
        "except tap.TfparError as error:\n"
        "    assert 'this process is rank {process} of 2' in str(error)\n"
        "with DataParallel().scope():\n"
        "    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])\n"
        "    model.compile('sgd', 'mse')\n"
        "model.fit(np.ones((4, 4)), np.ones((4, 2)), verbose=0)\n"
        "print(len(list_devices()), tap.plan_of(model).mesh)\n"
    )
    codes = [code.format(addresses=addresses, process=i, other=1 - i) for i in range(2)]
    with concurrent.futures.ThreadPoolExecutor(2) as both:
        for text in both.map(printed, codes):
            assert text.splitlines()[-1] == "2 batch=2"


@pytest.mark.slow
@pytest.mark.parametrize("first", ["keras", "tfpar"])
def test_importing_tfpar_is_enough(first):
    """Whichever is imported first; nothing of tfpar is called."""
    second = {"keras": "tfpar", "tfpar": "keras"}[first]
    code = (
        f"import {first}, {second}\n"
        "import keras\n"
        "from keras.distribution import DataParallel, set_distribution\n"
        "set_distribution(DataParallel(devices=['cpu:0', 'cpu:1']))\n"
        "model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])\n"
        "model.compile('sgd', 'mse')\n"
        "model.fit(keras.ops.ones((4, 4)), keras.ops.ones((4, 2)), verbose=0)\n"
        "import tfpar as tap\n"
        "print(tap.plan_of(model).mesh)\n"
    )
    assert printed(code).split()[-1] == "batch=2"


@pytest.mark.slow
def test_the_suite_that_keras_has_of_its_own_passes():
    """Its tests of `keras.distribution`, all of them: as if the backend were JAX, which they ask
    for, but with TensorFlow's answers."""
    code = (
        "import importlib, sys, unittest\n"
        "from unittest import mock\n"
        "import tensorflow as tf\n"
        "cpu = tf.config.list_physical_devices('CPU')[0]\n"
        "four = [tf.config.LogicalDeviceConfiguration()] * 4\n"
        "tf.config.set_logical_device_configuration(cpu, four)\n"
        "import keras, tfpar\n"
        "from keras.src import backend\n"
        "with mock.patch.object(backend, 'backend', lambda: 'jax'):\n"
        "    own = importlib.import_module('keras.src.distribution.distribution_lib_test')\n"
        "tests = unittest.defaultTestLoader.loadTestsFromModule(own)\n"
        "ran = unittest.TextTestRunner().run(tests)\n"
        "assert ran.testsRun > 30 and not ran.skipped, ran\n"
        "sys.exit(not ran.wasSuccessful())\n"
    )
    printed(code)


def test_outputs_inside_of_loops_are_refused(in_force):
    class Looped(keras.layers.Layer):
        def call(self, x):
            layout = TensorLayout(("data", "model"))

            def body(step, value):
                return step + 1, keras.distribution.distribute_tensor(value / 2.0, layout)

            return keras.ops.while_loop(lambda step, _: step < 2, body, (0, x))[1]

    in_force(by_columns())
    model = compiled(Looped(), keras.layers.Dense(4, name="fc2"))
    with pytest.raises(TfparError, match="inside of a loop or branch"):
        model.fit(*DATA, verbose=0)
