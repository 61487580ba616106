"""ATP (2-D tensor parallelism) trains as one device does: by constraints and by layers."""

from __future__ import annotations

import collections
import functools
import textwrap

import keras
import numpy as np
import pytest
from keras import layers

import tfpar as tap
from benchmarks.models import t5
from tests.cases import nightly
from tests.e2e.features import f
from tests.e2e.test_patterns import BATCH, HIDDEN, LENGTH, gpt, tokens
from tests.equivalence import assert_equivalent, train

MESHES = [{"d1": 2, "d2": 2}, {"d1": 2, "d2": 4}, {"data": 2, "d1": 2, "d2": 2}]

GPT = tap.from_layout_map(
    {
        r".*attention/(query|key|value)/kernel": ("d2", "d1", None),
        r".*attention/attention_output/kernel": ("d1", None, "d2"),
        r".*fc1/kernel": ("d2", "d1"),
        r".*fc2/kernel": ("d1", "d2"),
    }
)
T5 = tap.from_layout_map(
    {
        r".*/(query|key|value|wi)/kernel": ("d2", "d1"),
        r".*/(out|wo)/kernel": ("d1", "d2"),
    }
)


def small_t5():
    model = t5(vocabulary=48, length=8, hidden=16, head_dim=4, inner=32, num_layers=1)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, jit_compile=False)
    return model


def pairs(n=2 * BATCH):
    sources, targets = tokens(n, length=8, vocabulary=48)
    return [sources, targets], targets


def volume(collectives, axis, least):
    """In all-reduces, of which the other collectives are half."""
    return sum(
        size * (1 if kind == "all_reduce" else 0.5)
        for kind, axes, size in collectives
        if axes == (axis,) and size > least
    )


@functools.cache
def trained(axes):
    """A transformer on a mesh of these (name, size), and on one device."""
    return assert_equivalent(gpt, tokens(2 * BATCH), dict(axes), GPT, batch_size=BATCH)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [nightly(MESHES[0]), nightly(MESHES[1]), MESHES[2]], ids=str)
def test_gpt_trains_as_on_one_device(mesh):
    parallel, _ = trained(tuple(mesh.items()))
    specs = {
        name: spec.removeprefix("R,") if len(mesh) == 3 else spec
        for name, spec in parallel.specs().items()
    }
    assert specs["block_0_attention/query/kernel"] == "S(1),S(0)"
    assert specs["block_0_attention/query/bias"] == "S(0),R"
    assert specs["block_0_attention/attention_output/bias"] == "R,S(0)"
    assert specs["block_0_fc2/kernel"] == "S(0),S(1)"
    assert specs["block_0_ln1/gamma"] == specs["block_0_ln2/beta"] == "R,S(0)"
    assert specs["tokens/embeddings"] == "R,S(1)"


@pytest.mark.slow
def test_gpt_moves_what_equation_2_says():
    found = trained(tuple(MESHES[0].items()))[0].collectives()
    logits = BATCH * LENGTH * 50 * 4  # of the head, which nothing was said of
    found.remove(("all_reduce", ("d2",), logits))
    bs, least = BATCH * LENGTH * 4, BATCH * LENGTH * 4
    assert volume(found, "d1", least) == pytest.approx(bs * (2 + 2) * HIDDEN / 2)
    expected = bs * (7 + 5) * HIDDEN / 2
    assert volume(found, "d2", least) == pytest.approx(expected), "backward less than equation 2"
    assert {axes for _, axes, size in found if size > least} == {("d1",), ("d2",)}
    kinds = collections.Counter(kind for kind, _, size in found if size > least)
    assert kinds == {"all_reduce": 6, "reduce_scatter": 4, "all_gather": 4}


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_t5_trains_as_on_one_device(mesh):
    parallel, _ = assert_equivalent(small_t5, pairs(), mesh, T5, batch_size=BATCH)
    specs = parallel.specs()
    assert specs["tokens/embeddings"].endswith("R,S(1)")
    assert specs["decoder_block_0/cross_norm/scale"].endswith("R,S(0)")


# --- layers ---------------------------------------------------------------------------------------

COLUMN_FIRST, ROW_FIRST = [tap.Shard(1), tap.Shard(0)], [tap.Shard(0), tap.Shard(1)]


def mlp():
    inputs = keras.Input((8,))
    x = tap.layers.Dense(16, "relu", spec=COLUMN_FIRST, name="fc1")(inputs)
    x = tap.layers.Dense(8, spec=ROW_FIRST, name="fc2")(x)
    model = keras.Model(inputs, layers.Dense(4, name="head")(x))
    model.compile("adam", "mse", jit_compile=False)
    return model


def test_the_example_of_the_layers_runs():
    lines = tap.layers.__doc__.split("\n\n")
    example = next(textwrap.dedent(text) for text in lines if "tap.auto_parallel" in text)
    names = {"keras": keras, "tap": tap}
    exec(example, names)  # noqa: S102 - our own docstring
    model = names["model"]
    model.compile("sgd", "mse", jit_compile=False)
    model.fit(f(4, 256), f(4, 256), verbose=0)
    kernels = [v.spec for n, v in tap.plan_of(model).variables.items() if n.endswith("kernel")]
    assert kernels == [tuple(COLUMN_FIRST), tuple(ROW_FIRST)]


def regression(n=16):
    return f(n, 8), f(n, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "planner"),
    [(MESHES[0], None), nightly(MESHES[0], "tap"), nightly(MESHES[2], None), (MESHES[2], "tap")],
)
def test_layers_lay_their_kernels(mesh, planner):
    parallel, _ = assert_equivalent(mlp, regression(), mesh, batch_size=8, planner=planner)
    specs = parallel.specs()
    data = "R," * (len(mesh) - 2)
    assert specs["fc1/kernel"] == f"{data}S(1),S(0)"
    assert specs["fc2/kernel"] == f"{data}S(0),S(1)"
    (slot,) = (name for name in specs if name.endswith("fc1_kernel_momentum"))
    assert specs[slot] == f"{data}S(1),S(0)"
    if planner is None:
        assert specs["fc1/bias"] == f"{data}S(0),R"
        assert specs["fc2/bias"] == f"{data}R,S(0)"


@pytest.mark.slow
def test_plans_say_what_a_layer_asked_for():
    plan = tap.plan(mlp, regression(8), {"d1": 2, "d2": 2}, "rhino-m8")
    assert str(plan.variables["fc1/kernel"].spec) == "(S(1), S(0))"
    assert "spec of 'fc1/kernel': S(1) over 'd1', S(0) over 'd2'" in plan.constraints


@pytest.mark.slow
def test_a_layer_goes_before_patterns():
    constraints = [tap.replicate(r".*/kernel")]
    run = train(mlp, regression(), mesh={"d1": 2, "d2": 2}, constraints=constraints)
    assert run.specs()["fc1/kernel"] == "S(1),S(0)"
    assert run.specs()["head/kernel"] == "R,R"


def test_outside_it_is_a_plain_dense():
    x = f(3, 8)
    layer = tap.layers.Dense(4, "tanh", spec=COLUMN_FIRST)
    plain = layers.Dense(4, "tanh")
    plain.build((None, 8))
    layer.build((None, 8))
    layer.set_weights(plain.get_weights())
    np.testing.assert_array_equal(layer(x), plain(x))
    again = tap.layers.Dense.from_config(layer.get_config())
    assert again.spec == layer.spec == (tap.Shard(1), tap.Shard(0))


@pytest.mark.slow
def test_saved_models_keep_their_specs(tmp_path):
    path = tmp_path / "model.keras"
    with tap.auto_parallel({"d1": 2, "d2": 2}, planner=None):
        model = mlp()
    x, y = regression()
    model.fit(x, y, verbose=0)
    model.save(path)
    loaded = keras.saving.load_model(path)  # on one device
    np.testing.assert_allclose(loaded.predict(x, verbose=0), model.predict(x, verbose=0), 1e-5)
    assert loaded.get_layer("fc2").spec == (tap.Shard(0), tap.Shard(1))
    moved = tap.parallelize(loaded, {"d1": 1, "d2": 2}, planner=None)
    moved.fit(x, y, verbose=0)
    assert str(tap.plan_of(moved).variables["fc1/kernel"].spec) == "(S(1), S(0))"


class Gated(layers.Layer):
    """A layer of one's own: two kernels side by side, split column-first."""

    def build(self, shape):
        both = self.add_weight((2, shape[-1], 8), name="both")
        self.both = tap.layers.lay(both, [tap.Replicate(), tap.Shard(-1)])

    def call(self, x):
        return keras.ops.sigmoid(x @ self.both[0]) * (x @ self.both[1])


@pytest.mark.slow
def test_layers_of_ones_own_lay_theirs():
    def build():
        inputs = keras.Input((8,))
        model = keras.Model(inputs, layers.Dense(4)(Gated(name="gated")(inputs)))
        model.compile("sgd", "mse", jit_compile=False)
        return model

    parallel, _ = assert_equivalent(build, regression(), {"data": 2, "model": 2}, batch_size=8)
    assert parallel.specs()["gated/both"] == "R,S(2)"


@pytest.mark.parametrize(
    "spec, message",
    [
        ([tap.Shard(2)], r"Layer 'fc': S\(2\) splits dim 2, but the weight has 2 dims"),
        ([tap.Partial()], r"Layer 'fc': an entry of spec is P\(sum\); it must be tap.Shard"),
        (["S[0]"], r"Layer 'fc': Cannot read placement 'S\[0\]'"),
        ([1, 0], "Layer 'fc': an entry of spec is 1; it must be"),
        ("S(0)", r"Layer 'fc': spec is 'S\(0\)'; it must be a list of placements"),
        (None, "Layer 'fc': spec is None; it must be a list of placements"),
    ],
)
def test_malformed_specs_are_refused(spec, message):
    with pytest.raises(tap.TfparError, match=message):
        tap.layers.Dense(4, spec=spec, name="fc")


def test_a_spec_longer_than_the_mesh_is_refused():
    with tap.auto_parallel({"model": 2}), pytest.raises(tap.TfparError, match="fc1.* 2 placements"):
        mlp()
    model = mlp()
    with pytest.raises(tap.TfparError, match="'fc1/kernel'.*the mesh has 1 axes"):
        tap.parallelize(model, {"model": 2}, planner=None).fit(*regression(), verbose=0)
