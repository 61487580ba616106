"""Plan files that do not fit: what is said, and the model stays usable."""

from __future__ import annotations

import json

import keras
import pytest
from keras import layers

import tfpar as tap
from tests.e2e.test_errors import COLUMN, X, Y, assert_usable, build, parallel
from tfpar.spec import PlanError, TfparError
from tfpar.tf.keras import parallel_model


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory):
    keras.utils.clear_session(free_memory=False)
    model = parallel()
    model.fit(X, Y, batch_size=8, verbose=0)
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    tap.plan_of(model).save(path)
    keras.utils.clear_session(free_memory=False)
    return path


@pytest.mark.slow
def test_plan_files_that_cannot_be_used(plan_file, tmp_path):
    good = json.loads(plan_file.read_text())
    bad = tmp_path / "bad.json"
    for content, sign in (
        (plan_file.read_text()[:100], "corrupt"),
        (json.dumps({**good, "version": 99, "tfpar": "9.0"}), "newer tfpar"),
        ("[1, 2]", "not a plan file"),
        (json.dumps({k: v for k, v in good.items() if k != "mesh"}), "mesh is missing"),
    ):
        bad.write_text(content)
        with pytest.raises(PlanError, match=sign):
            with tap.auto_parallel(plan=str(bad)):
                build()
        model = build()
        with pytest.raises(PlanError, match=sign):
            tap.parallelize(model, plan=str(bad))
        assert parallel_model(model) is None
    with pytest.raises(PlanError, match="no plan file"):
        tap.auto_parallel(plan=str(tmp_path / "none.json"))
    model.fit(X, Y, batch_size=8, verbose=0)


@pytest.mark.slow
def test_plan_of_another_model(plan_file):
    def other():
        model = keras.Sequential(
            [keras.Input((6,)), layers.Dense(12, name="fc1"), layers.Dense(2, name="head")]
        )
        model.compile("sgd", "mse", jit_compile=False)
        return model

    keras.utils.set_random_seed(7)
    with tap.auto_parallel(plan=str(plan_file)):
        model = other()
    with pytest.raises(PlanError, match="another model.*fc2"):
        model.fit(X, Y, batch_size=8, verbose=0)
    assert_usable(model, make=other)


@pytest.mark.slow
def test_plan_for_another_mesh(plan_file):
    with pytest.raises(PlanError, match=r"is for 4 ranks \(data=2 x model=2\), not for the 2"):
        parallel((), tap.split([2]), plan=str(plan_file))


@pytest.mark.slow
def test_plan_and_constraints_exclude_each_other(plan_file):
    with pytest.raises(TfparError, match="plan.*constraints|constraints.*plan"):
        parallel(COLUMN, plan=str(plan_file))
