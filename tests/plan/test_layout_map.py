"""`Plan.to_layout_map`: a plan's weights as Keras says them, and back."""

from __future__ import annotations

import math
import re
import subprocess
import sys

import keras
import numpy as np
import pytest

import tfpar as tap
from tests.plan.graphs import mlp
from tfpar.constraints import from_layout_map
from tfpar.plans import Plan, plan_from_constraints
from tfpar.spec import ArgumentError, Mesh, PlanError

MESH = Mesh.of({"data": 2, "model": 2})
CONSTRAINTS = [
    tap.shard("fc1/kernel", 1, "model"),
    tap.shard("fc1/bias", 0, "model"),
    tap.shard("fc2/kernel", 1, "data"),
    tap.shard("fc2/kernel", 0, "model"),
    tap.replicate("head/.*"),
]


def planned(*constraints, mesh=MESH):
    return plan_from_constraints(mlp(), mesh, constraints or CONSTRAINTS)


def device_mesh(mesh):
    devices = [f"cpu:{i}" for i in range(mesh.size)]
    return keras.distribution.DeviceMesh(mesh.shape, list(mesh.axis_names), devices)


def test_every_variable_has_an_entry_by_its_path():
    layouts = planned().to_layout_map(device_mesh(MESH))
    assert {path: layout.axes for path, layout in layouts.items()} == {
        f"^{re.escape(path)}$": axes
        for path, axes in {
            "block_0/fc1/kernel": (None, "model"),
            "block_0/fc1/bias": ("model",),
            "block_0/fc2/kernel": ("model", "data"),
            "head/kernel": (None, None),
            "head/bias": (None,),
        }.items()
    }
    assert isinstance(layouts, keras.distribution.LayoutMap)
    assert layouts["block_0/fc1/kernel"].axes == (None, "model")
    assert layouts["other/block_0/fc1/kernel"] is None and layouts["block_0/fc2/bias"] is None


@pytest.mark.parametrize("through_a_file", [False, True])
def test_it_reads_back_as_the_same_plan(through_a_file):
    plan = planned()
    if through_a_file:
        plan = Plan.from_json(plan.to_json())
    again = planned(*from_layout_map(plan.to_layout_map(device_mesh(MESH))), tap.batch("data"))
    specs = [{n: v.spec for n, v in p.variables.items()} for p in (plan, again)]
    assert specs[0] == specs[1]


def test_a_searched_plan_reads_back():
    """The mesh is that of the devices that Keras sees."""
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, name="fc")])
    devices = keras.distribution.list_devices()
    mesh = Mesh.of({"data": 1, "model": min(2, len(devices))})
    batch = np.zeros((8, 6), "float32"), np.zeros((8, 8), "float32")

    def build():
        model.compile("sgd", "mse", jit_compile=False)
        return model

    wish = [tap.shard("fc/kernel", 1, "model")]
    found = tap.plan(build, batch, mesh, "v100-ethernet", wish, planner="tap")
    layouts = found.to_layout_map()
    assert layouts.device_mesh.devices.tolist() == [devices[: mesh.size]]
    assert layouts[model.layers[0].kernel.path].axes == (None, "model")
    assert layouts[model.layers[0].bias.path] is not None  # which propagation has laid
    back = tap.plan(build, batch, mesh, "v100-ethernet", layouts, planner="tap")
    laid = {v.name: spec for v, spec in found.partitioned.variable_specs.items()}
    assert {n: laid[n] for n in found.variables} == {n: v.spec for n, v in back.variables.items()}


REFUSED = {
    "over 'data' and 'model', and Keras takes one mesh axis": (
        [tap.shard("fc1/kernel", 1, "data"), tap.shard("fc1/kernel", 1, "model")],
        MESH,
    ),
    "in strides over 'model'": ([tap.shard("fc1/kernel", 1, "model", stride=5)], MESH),
    r"dim 1 over 'model', of 4 ranks, and JAX splits evenly": (
        [tap.shard("fc1/kernel", 1, "model")],
        Mesh.of({"data": 1, "model": 4}),
    ),
}


@pytest.mark.parametrize("told", REFUSED)
def test_what_layouts_cannot_say_is_refused(told):
    constraints, mesh = REFUSED[told]
    with pytest.raises(PlanError, match=told) as error:
        planned(*constraints, mesh=mesh).to_layout_map(device_mesh(mesh))
    assert "'block_0/fc1/kernel' of shape (6, 10)" in str(error.value)


def test_an_axis_of_one_rank_splits_nothing():
    mesh = Mesh.of({"data": 1, "model": 2})
    both = [tap.shard("fc1/kernel", 1, "data"), tap.shard("fc1/kernel", 1, "model")]
    layouts = planned(*both, mesh=mesh).to_layout_map(device_mesh(mesh))
    assert layouts["block_0/fc1/kernel"].axes == (None, "model")


def test_device_meshes_that_are_not_the_plan_s():
    with pytest.raises(ArgumentError, match="device_mesh is .*DeviceMesh.*data=2 x model=2"):
        planned().to_layout_map(device_mesh(Mesh.of({"data": 4, "model": 1})))
    with pytest.raises(ArgumentError, match="device_mesh is 3"):
        planned().to_layout_map(3)
    large = Mesh.of({"data": 2, "model": 64})
    with pytest.raises(PlanError, match="128 ranks .* but Keras sees .* Give device_mesh="):
        planned(tap.replicate(".*"), mesh=large).to_layout_map()
    assert math.prod(large.shape) > len(keras.distribution.list_devices())


def test_a_plan_with_stages_is_refused():
    pipeline = tap.Pipeline(stages=2, microbatches=2)

    def build():
        layers = [keras.layers.Dense(6, name=f"fc{i}") for i in range(2)]
        model = keras.Sequential([keras.Input((6,)), *layers])
        model.compile("sgd", "mse", jit_compile=False)
        return model

    batch = np.zeros((8, 6), "float32"), np.zeros((8, 6), "float32")
    plan = tap.plan(build, batch, [2], "v100-ethernet", planner="tap", pipeline=pipeline)
    with pytest.raises(PlanError, match="The plan has 2 stages, and a layout map"):
        plan.to_layout_map()


def test_no_tensorflow_is_needed(tmp_path):
    """Users of JAX have their plan from a file. (Keras alone is there: it would load a backend.)"""
    planned().save(tmp_path / "p.json")
    code = (
        "import sys, types\n"
        "sys.modules['tensorflow'] = None\n"
        "class Mesh(types.SimpleNamespace): pass\n"
        "class Layouts(dict):\n"
        "    def __init__(self, mesh): self.mesh = mesh\n"
        "keras = types.SimpleNamespace(LayoutMap=Layouts, DeviceMesh=Mesh)\n"
        "sys.modules.update({'keras': keras, 'keras.distribution': keras})\n"
        "import tfpar as tap\n"
        "mesh = Mesh(shape=(2, 2), axis_names=['data', 'model'])\n"
        f"layouts = tap.Plan.load({str(tmp_path / 'p.json')!r}).to_layout_map(mesh)\n"
        "assert layouts['^block_0/fc2/kernel$'] == ('model', 'data') and layouts.mesh is mesh"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
