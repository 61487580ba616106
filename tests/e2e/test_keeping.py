"""`tap.keep` in searches: what is kept is laid as before, and numbers stay those of one device."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import tfpar as tap
from tfpar.spec import SpecError

X = np.random.default_rng(0).normal(size=(8, 6)).astype("float32")
Y = np.arange(8, dtype="int32") % 3


def build():
    layers = [keras.layers.Dense(8, "relu", name=f"fc{i}") for i in range(3)]
    model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(3, name="head")])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, jit_compile=False)
    return model


def of_layers(plan, *layers):
    """What the plan says of the kernels of these layers, each model having a name of its own."""
    kernels = {n.split("/")[-2]: v for n, v in plan.variables.items() if n.endswith("/kernel")}
    return {layer: kernels[layer] for layer in layers}


def specs(plan, *layers):
    return [v.spec for v in of_layers(plan, *layers).values()]


MESH = tap.Mesh.of({"data": 2, "model": 2})
ASKED = dict(cluster="v100-ethernet", planner="tap")


@pytest.fixture(scope="module")
def old():
    """A plan that no search would find."""
    odd = [tap.shard("fc0/kernel", 0, "model"), tap.shard("fc1/kernel", 1, "data")]
    return tap.plan(build, (X, Y), MESH, constraints=odd, **ASKED)


@pytest.mark.slow
def test_the_rest_is_searched_around_what_is_kept(old, tmp_path):
    old.save(tmp_path / "p.json")
    kept = tap.keep(tmp_path / "p.json", "fc[01]")
    new = tap.plan(build, (X, Y), MESH, constraints=kept, **ASKED)
    assert specs(new, "fc0", "fc1") == specs(old, "fc0", "fc1")
    assert all("keep(" in v.why for v in of_layers(new, "fc0", "fc1").values())
    searched = of_layers(new, "fc2", "head").values()
    assert all(v.spec is not None and v.why == "chosen by the tap planner" for v in searched)
    assert new.batch_axes == old.batch_axes


@pytest.mark.slow
def test_numbers_are_those_of_one_device(old):
    def trained(model):
        history = model.fit(X, Y, batch_size=8, epochs=3, shuffle=False, verbose=0).history
        return history["loss"], model.get_weights()

    keras.utils.set_random_seed(1)
    losses, weights = trained(build())
    keras.utils.set_random_seed(1)
    with tap.auto_parallel(MESH, tap.keep(old, "fc[01]"), verbose=0, **ASKED):
        model = build()
    found, moved = trained(model)
    assert specs(tap.plan_of(model), "fc0", "fc1") == specs(old, "fc0", "fc1")
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    for one, other in zip(moved, weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_layers_stay_in_their_stages():
    pipeline = tap.Pipeline(stages=2, microbatches=2)
    first = [tap.stage("fc0", 0), tap.stage("fc1|fc2|head", 1)]
    arguments = dict(**ASKED, pipeline=pipeline)
    old = tap.plan(build, (X, Y), [2], constraints=first, **arguments)
    kept = tap.keep(old, "fc0|fc1")
    new = tap.plan(build, (X, Y), old.whole_mesh, constraints=kept, **arguments)
    for plan in (old, new):
        stages = {n.split("/")[-2]: s for n, s in plan.stages.owners.items() if "/fc" in f"/{n}"}
        assert stages["fc0"] == 0 and stages["fc1"] == 1
    with pytest.raises(SpecError, match="there is no pipeline of several stages"):
        tap.plan(build, (X, Y), old.whole_mesh, constraints=kept, **ASKED)
