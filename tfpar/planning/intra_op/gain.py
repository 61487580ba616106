"""Seconds that training can gain by a search, which is to take no longer.

    training steps  x  (step of the best plan that takes no search  -  lower bound of a step)

Both are predictions, and what a search takes is estimated by the size of its graph, or counted in
candidates. No clock is read: so the plan does not depend on how busy a machine is, and all
processes that plan one step find the same.
"""

from __future__ import annotations

import math

from tfpar.cost.evaluation import evaluate
from tfpar.planning.folding.folded_model import FoldedModel
from tfpar.planning.intra_op.tie_breaking import baselines
from tfpar.planning.meshes import shapes
from tfpar.planning.problem import Problem

DEFAULT_STEPS = 10_000
"""Assumed number of training steps where it is unknown: data of unknown length, or a loop that
calls steps one by one."""

LEAST_SECONDS = 1.0
"""Time that any search may take, in seconds: about as much as tracing a step does."""

SECONDS_PER_AXIS = 5e-5
"""Seconds of Rhino's planner for each op along a mesh axis, over the root of the number of ops: its
programs take longer than in proportion to their size (empirical, on a slow core)."""

SECONDS_PER_CANDIDATE = 1e-3
"""Seconds of TAP's planner to price one plan (empirical, on the same core: 0.7 to 2 ms, for graphs
of 45 to 1,100 ops)."""


def allowed_seconds(problem: Problem, model: FoldedModel) -> float:
    """Limit of a search by what training can gain, in seconds; infinite where that is not asked.

    Where no plan is known that fits, a search is for memory, and takes what it takes.

    Args:
        model: the problem's, folded.
    """
    steps = problem.aim.budget.steps
    if steps is None or problem.aim.budget.seconds is not None:
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
    """Return a lower bound of a step without stages: every rank starts all ops, and does an even
    part of their work; nothing is communicated."""
    laid, cluster = model.on_one_device(), problem.cluster
    whole, working = (
        evaluate(laid, machines, model.roles, problem.step.state_ratio).compute_s
        for machines in (cluster, cluster.with_device(launch_s=0.0))
    )
    ranks = problem.meshes[0].mesh.size
    return sum(whole) - sum(working) + sum(working) / ranks + cluster.step_s


def rhino_seconds(problem: Problem, model: FoldedModel) -> float:
    """Estimate of the seconds that Rhino's planner takes for a problem."""
    ops = len(model.prepared.graph.ops)
    split = [sum(n > 1 for n in mesh.shape) for mesh, _ in shapes(problem.meshes)]
    # Behind each axis but the last two ways go on, seldom three.
    axes = sum(max(1, 2 * n - 1) for n in split)
    return float(SECONDS_PER_AXIS * ops**1.5 * axes)
