"""A model's training step, captured to be planned, and plans of it that constraints give."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras

import tfpar as tap
from benchmarks import models
from tfpar.cluster.description import Cluster
from tfpar.compile import simplify_step
from tfpar.constraints.constraint_types import Constraint
from tfpar.planning.pricing.price import price_whole
from tfpar.planning.problem import Problem
from tfpar.planning.problems import state_problem
from tfpar.planning.request import PlanRequest
from tfpar.plans import Plan, plan_from_constraints
from tfpar.tf.capture.step import CapturedStep, argument_specs
from tfpar.tf.keras.adapter import parallel_model

STATE = 2.0
"""Bytes of Adam's slots by byte of weight."""


def captured_step(build: Callable[[], keras.Model], batch: int) -> CapturedStep:
    """The forward and backward pass of a model on so many samples; no weight is given memory."""
    with tap.auto_parallel([1], planner=None):
        model = models.compile_model(build())
    specs = argument_specs((models.batch_of(model, batch),))
    step = parallel_model(model).capture_gradients(specs)
    simplify_step(step)
    return step


def constrained(
    step: CapturedStep,
    batch: int,
    cluster: Cluster,
    mesh: tap.Mesh,
    constraints: Sequence[Constraint],
) -> tuple[Plan, Problem]:
    """The plan that constraints alone give, priced, and what it is a plan of."""
    problem = state_problem(
        step, PlanRequest(mesh, cluster, tuple(constraints)), batch, state_ratio=STATE
    )
    plan = plan_from_constraints(step.graph, mesh, constraints, gradients=step.gradients)
    cost, _ = price_whole(plan, problem)
    return plan.with_findings(cost=cost), problem
