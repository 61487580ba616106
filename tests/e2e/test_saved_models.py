"""Models that come through files: plans, constraints and checkpoints find their weights.

`load_model` builds layer by layer, so that the paths of most weights lack the names of the models
around them.
"""

import keras
import numpy as np
import pytest
from keras import layers

import tfpar as tap
from tfpar.spec import Shard

rng = np.random.default_rng(0)
X = rng.normal(size=(16, 6)).astype("float32")
Y = rng.normal(size=(16, 3)).astype("float32")


def sequential():
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, name="a"),
            layers.Dropout(0.3),
            layers.Dense(3, name="b"),
        ],
        name="net",
    )


def functional():
    """Two encoders whose weights have the same paths once they are loaded."""
    inputs = keras.Input((6,))
    left = keras.Sequential([layers.Dense(8, name="a"), layers.Dropout(0.3)], name="left")
    right = keras.Sequential([layers.Dense(8, name="a")], name="right")
    return keras.Model(inputs, layers.Dense(3, name="b")(right(left(inputs))), name="net")


@keras.saving.register_keras_serializable()
class Subclassed(keras.Model):
    def __init__(self, name=None, **arguments):
        super().__init__(name=name, **arguments)
        self.inner = keras.Sequential([layers.Dense(8, name="a"), layers.Dropout(0.3)], name="left")
        self.head = layers.Dense(3, name="b")

    def call(self, x, training=False):
        return self.head(self.inner(x, training=training))


def subclassed():
    model = Subclassed(name="net")
    model(X)
    return model


@pytest.fixture(
    params=[
        functional,
        *(pytest.param(build, marks=pytest.mark.slow) for build in (sequential, subclassed)),
    ],
    ids=lambda build: build.__name__,
)
def run(request, tmp_path):
    """A model that has trained an epoch on a mesh, its first weight split, and its files."""
    keras.utils.set_random_seed(3)
    paths = {sequential: "net/a", functional: "left/a", subclassed: "net/left/a"}
    path = f"{paths[request.param]}/kernel"
    constraints = [tap.shard(path, dim=1, axis="model")]
    with tap.auto_parallel(tap.split([2, 2]), constraints, planner=None, verbose=0):
        model = request.param()
        model.compile("adam", "mse")
    assert model.weights[0].path == path
    model.save(tmp_path / "untrained.keras")
    epoch(model)
    tap.save_checkpoint(model, str(tmp_path / "checkpoints"))
    tap.plan_of(model).save(tmp_path / "plan.json")
    model.save(tmp_path / "trained.keras")
    return model, constraints, tmp_path


def epoch(model):
    return model.fit(X, Y, batch_size=8, shuffle=False, verbose=0).history["loss"]


def assert_goes_on_alike(loaded, other):
    np.testing.assert_allclose(epoch(loaded), epoch(other), rtol=1e-5)
    for got, want in zip(loaded.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    kernels = [w for w in loaded.weights if w.path.endswith("a/kernel")]
    split = [w.value.layout[1][1] == Shard(1) for w in kernels]
    assert split == [True] + [False] * (len(kernels) - 1)


def load(path):
    keras.utils.set_random_seed(4)  # Keras saves no seeds of dropout
    return keras.models.load_model(path)


@pytest.mark.slow
def test_a_plan_fits_a_loaded_model(run):
    _, _, folder = run
    with tap.auto_parallel(plan=str(folder / "plan.json"), verbose=0):
        loaded = load(folder / "trained.keras")
    assert_goes_on_alike(loaded, load(folder / "trained.keras"))
    tap.plan_of(loaded).save(folder / "again.json")  # with the names of now
    with tap.auto_parallel(plan=str(folder / "again.json"), verbose=0):
        again = load(folder / "trained.keras")
    epoch(again)


def test_constraints_and_checkpoints_find_the_weights_of_a_loaded_model(run):
    model, constraints, folder = run
    with tap.auto_parallel(tap.split([2, 2]), constraints, planner=None, verbose=0):
        loaded = keras.models.load_model(folder / "untrained.keras")
    tap.restore_checkpoint(loaded, str(folder / "checkpoints"))
    assert_goes_on_alike(loaded, model)
