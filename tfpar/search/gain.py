"""Seconds that training can gain by a search, which is to take no longer.

    training steps  x  (step of the best plan that takes no search  -  lower bound of a step)

Both are predictions, and what a search takes is estimated by the size of its graph, or counted in
candidates. No clock is read: so the plan does not depend on how busy a machine is, and all
processes that plan one step find the same.
"""

from __future__ import annotations

import math

from tfpar.cost.evaluate import evaluate
from tfpar.search.meshes import shapes
from tfpar.search.model.folded_model import FoldedModel
from tfpar.search.problem import Problem
from tfpar.search.simplest import baselines

DEFAULT_STEPS = 10_000
"""How many steps a training is taken to have where nobody knows: data of unknown length, or a loop
that calls steps one by one."""

LEAST_SECONDS = 1.0
"""What a search may take in any case, in seconds: about as much as tracing a step does."""

SECONDS_PER_AXIS = 5e-5
"""What Rhino's planner takes for an op along a mesh axis, times the root of the number of ops: what
its programs take grows faster than they do (empirical, on a slow core)."""

SECONDS_PER_CANDIDATE = 1e-3
"""What TAP's planner takes to price one plan (empirical, on the same core: 0.7 to 2 ms, for graphs
of 45 to 1,100 ops)."""


def allowed_seconds(problem: Problem, model: FoldedModel) -> float:
    """What a search may take by what training can gain; infinite where that is not asked.

    Where no plan is known that fits, a search is for memory, and takes what it takes.

    Args:
        model: the problem's, folded.
    """
    steps = problem.budget.steps
    if steps is None or problem.budget.seconds is not None:
        return math.inf
    known = [
        found.cost.seconds
        for found in baselines(problem, model)
        if not problem.excess_in_parts(found.cost)
    ]
    if not known:
        return math.inf
    return max(LEAST_SECONDS, steps * (min(known) - least_seconds(problem, model)))


def least_seconds(problem: Problem, model: FoldedModel) -> float:
    """A lower bound of a step without stages: every rank starts all ops, and does an even part of
    their work; nothing is communicated."""
    laid, cluster = model.on_one_device(), problem.cluster
    whole, working = (
        evaluate(laid, machines, model.roles, problem.state_ratio).compute_s
        for machines in (cluster, cluster.with_device(launch_s=0.0))
    )
    ranks = problem.meshes[0].mesh.size
    return sum(whole) - sum(working) + sum(working) / ranks + cluster.step_s


def rhino_seconds(problem: Problem, model: FoldedModel) -> float:
    """What Rhino's planner takes for a problem, about."""
    ops = len(model.prepared.graph.ops)
    split = [sum(n > 1 for n in mesh.shape) for mesh, _ in shapes(problem.meshes)]
    # Behind each axis but the last two ways go on, seldom three.
    axes = sum(max(1, 2 * n - 1) for n in split)
    return float(SECONDS_PER_AXIS * ops**1.5 * axes)
