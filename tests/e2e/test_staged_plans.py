"""Training steps as Keras traces them, planned in stages: every op and every variable has one."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers

import tfpar as tap
from tests.cases import nightly
from tests.e2e.test_mixed_precision import policy
from tests.e2e.test_overlap import classifier, samples
from tests.e2e.test_patterns import gpt, moe, tokens
from tests.e2e.test_recurrent import RECURRENT
from tests.e2e.test_recurrent import classifier as recurrent
from tests.e2e.test_recurrent import tokens as sentences
from tfpar.cluster import read_preset
from tfpar.compile import simplify_step
from tfpar.ir import UPDATE, Roles
from tfpar.pipeline import Pipeline, assignable, stages_of_step
from tfpar.planning.inter_op import assign_stages
from tfpar.planning.intra_op import find_planner
from tfpar.plans import Plan, plan_from_constraints
from tfpar.settings import Settings
from tfpar.spec import Mesh, SpecError
from tfpar.tf.capture import argument_specs
from tfpar.tf.keras import install, parallel_model
from tfpar.tf.session import Session


class Planned:
    """A model that a session plans in stages."""

    def __init__(self, build, pipeline: Pipeline, constraints=(), planner=None, mesh=(2, 2)):
        found = None if planner is None else find_planner(planner)
        settings = Settings(
            pipeline=pipeline, constraints=tuple(constraints), planner=found, verbose=False
        )
        install()
        self.session = Session(Mesh.of(list(mesh)), settings)
        with self.session.scope():
            self.model = build()
        self.state = parallel_model(self.model)

    def plan(self, batch, kind: str = "train") -> Plan:
        return self.state.step(kind).find_plan(argument_specs((batch,)))

    def captured(self, batch):
        step = self.state.step("train").capture(argument_specs((batch,)))
        simplify_step(step)
        return step


def penalized() -> keras.Model:
    inputs = keras.Input((6,))
    h = layers.Dense(12, "relu", kernel_regularizer="l2", name="fc1")(inputs)
    h = layers.Dense(12, "relu", name="fc2")(h)
    model = keras.Model(inputs, layers.Dense(3, kernel_regularizer="l2", name="fc3")(h))
    optimizer = keras.optimizers.Adam(0.01, global_clipnorm=1.0, use_ema=True)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def halves() -> keras.Model:
    with policy("mixed_float16"):
        return penalized()


def rows(size: int) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros((size, 6, 8), "float32"), np.zeros((size, 6, 3), "float32")


def lstm() -> keras.Model:
    return recurrent(RECURRENT["lstm"])


MODELS = {
    "penalties, clipping and EMA": (penalized, samples, "fc3"),
    "batch normalization and dropout": (classifier, samples, "fc2"),
    "loss scaling": (halves, samples, "fc3"),
    "gpt": (gpt, tokens, "head"),
    "experts": (moe, rows, "moe"),
    "loops": (lstm, sentences, "dense.*"),
}


BY_DEFAULT = ("penalties, clipping and EMA", "loss scaling", "experts")


@pytest.mark.slow
@pytest.mark.parametrize("name", [n if n in BY_DEFAULT else nightly(n) for n in MODELS])
def test_a_training_step_has_stages_at_every_batch_size(name):
    build, data, last = MODELS[name]
    found = Planned(build, Pipeline(2, 2), [tap.stage(last, 1)])
    plan = found.plan(data(8))
    assert plan.stages is not None and plan.num_ranks == 4 and plan.mesh == Mesh.of([1, 2])
    for size in (8, 5):
        batch = data(size)
        step = found.captured(batch)
        roles = Roles.of(step.graph, step.gradient_tensors)
        ops = assignable(step.graph, roles)
        forward = plan.fitted(step.graph, gradients=step.gradients).stages.forward_stages(ops)
        stage = stages_of_step(step.graph, roles, forward)
        assert {*stage.values()} == {0, 1}
        updates = [op for op in step.graph.ops if roles.phase[op] == UPDATE]
        assert {stage[op] for op in updates} == {0, 1}
        planned = found.plan(batch).stages
        assert planned.owners == {v.name: stage[v.handle.op] for v in step.graph.variables}
        assert planned.scopes == plan.stages.scopes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["penalties, clipping and EMA", nightly("gpt")])
def test_a_plan_made_without_an_optimizer_is_one_for_training(name):
    """Names of models and of what lies outside of them are counted up: they are others by then."""
    build, data, last = MODELS[name]
    pipeline, constraints = Pipeline(2, 2), [tap.stage(last, 1)]
    planned = Planned(build, pipeline, constraints)
    gradients = planned.state.capture_gradients(argument_specs((data(8),)))
    simplify_step(gradients)
    plan = plan_from_constraints(
        gradients.graph, planned.session.stage_mesh, constraints, gradients=gradients.gradients
    )
    plan = assign_stages(plan, gradients, pipeline, read_preset("dgx-a100"), constraints)
    assert all("/" in scope or scope == "compile_loss" for scope in plan.stages.scopes)
    plan = Plan.from_json(plan.to_json())

    trained = Planned(build, pipeline)
    step = trained.captured(data(5))
    fitted = plan.fitted(step.graph, gradients=step.gradients).stages
    assert {*fitted.scopes} != {*plan.stages.scopes}, "the model's name is another"
    roles = Roles.of(step.graph, step.gradient_tensors)
    stage = stages_of_step(step.graph, roles, fitted.forward_stages(assignable(step.graph, roles)))
    weights = {v.name: stage[v.handle.op] for v in step.graph.variables if v.trainable}
    assert weights == {n: s for n, s in plan.stages.owners.items() if n in weights}
    assert {*weights.values()} == {0, 1}


@pytest.mark.slow
@pytest.mark.parametrize("planner", [nightly(None), "tap"])
def test_steps_of_a_model_share_their_stages(planner):
    """A plan made for one batch, or for prediction, says where the weights of all lie."""
    for first, second in (("train", "test"), ("predict", "train")):
        found = Planned(penalized, Pipeline(2, 4, "gpipe"), planner=planner)
        batch = samples(8) if first == "train" else samples(8)[:1]
        before = found.plan(batch, first)
        assert {*before.stages.owners.values()} == {0, 1}
        after = found.plan(samples(6), second)
        shared = {*before.stages.owners} & {*after.stages.owners}
        assert sum(before.variables[name].trainable for name in shared) == 6
        assert all(before.stages.owners[n] == after.stages.owners[n] for n in shared)
        assert after.stages.schedule == before.stages.schedule
        assert found.session.mesh == Mesh.of([2, 2])


def test_constraints_lay_weights_on_the_ranks_of_a_stage():
    constraints = [tap.shard("fc2/kernel", 1, "model"), tap.stage("fc[12]", 0), tap.stage("fc3", 1)]
    plan = Planned(penalized, Pipeline(2, 2), constraints).plan(samples(8))
    assert plan.constraints == tuple(map(str, constraints))
    assert str(plan.variables["fc2/kernel"].spec) == str((tap.Replicate(), tap.Shard(1)))
    assert plan.batch_axes == ("data",) and plan.whole_mesh == Mesh.of([2, 2])
    owners = {n: s for n, s in plan.stages.owners.items() if n.startswith("fc")}
    assert owners == {f"fc{i}/{w}": int(i == 3) for i in (1, 2, 3) for w in ("kernel", "bias")}


def test_a_mesh_that_has_no_such_parts_is_refused_at_once():
    with pytest.raises(SpecError, match="on 5 sets of ranks; the mesh has 4"):
        Planned(penalized, Pipeline(5, 2))
