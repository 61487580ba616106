"""What today's cost model says of steps that were measured before: nothing is run.

`benchmarks/results/prediction.json` keeps, of each setting, the calibrated cluster and what the
steps of each plan took. Plans are laid out here anew and priced on that cluster.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import tfpar as tap
from benchmarks import models
from benchmarks.plans_to_predict import BATCHES, SEARCHED, model_of, plans
from tfpar.cluster.files import cluster_of
from tfpar.compile import CompileOptions, compile_step, prepare_step
from tfpar.cost.evaluation import evaluate
from tfpar.ir.roles import Roles
from tfpar.planning.meshes import input_spec
from tfpar.planning.problems import batched_inputs
from tfpar.plans import plan_from_constraints
from tfpar.propagation.partitioned_graph import PartitionedGraph
from tfpar.propagation.prepared_graph import PreparedGraph
from tfpar.spec import Mesh
from tfpar.tf.capture.step import CapturedStep, argument_specs
from tfpar.tf.keras.adapter import parallel_model


def repriced(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the plans of one setting, with today's predictions.

    A plan that a search has found is left out: it may not be what it finds today.
    """
    rows = list(rows)
    cluster = cluster_of(rows[0]["cluster"])
    found = []
    for row in rows:
        if row["plan"] != SEARCHED:
            partitioned, roles = laid(row["model"], row["plan"], cluster.size)
            cost = evaluate(partitioned, cluster, roles)
            found.append({**row, "predicted_s": cost.seconds, "cost": dataclasses.asdict(cost)})
    return found


@functools.cache
def laid(model: str, plan: str, ranks: int) -> tuple[PartitionedGraph, Roles]:
    """The training step of a model as a plan lays it over so many ranks."""
    step, prepared = _step(model)
    shape, constraints = plans(model, ranks)[plan]
    mesh = Mesh.of(shape)
    chosen = plan_from_constraints(step.graph, mesh, constraints, gradients=step.gradients)
    batched = batched_inputs(step, BATCHES[model])
    axes = [mesh.axis(name) for name in chosen.batch_axes]
    fed = [input_spec(tensor in batched, mesh, axes) for tensor in step.graph.inputs]
    options = CompileOptions(mesh, dataclasses.replace(chosen.anchors(), inputs=fed), batched)
    partitioned = compile_step(step, options, prepared).partitioned
    gradients = [tensor for gradient in step.gradients for tensor in gradient.tensors]
    return partitioned, Roles.of(partitioned.graph, gradients)


@functools.cache
def _step(model: str) -> tuple[CapturedStep, PreparedGraph]:
    """Forward, backward and update; captured once, as it is the same for all plans."""
    with tap.auto_parallel([1], planner=None):
        built = models.compile_model(model_of(model))
    state = parallel_model(built)
    assert state is not None
    step = state.step("train").capture(argument_specs((models.batch_of(built, BATCHES[model]),)))
    return step, prepare_step(step)
