"""The planner that picks a planner, by the graph and by what time there is."""

from __future__ import annotations

import dataclasses
import logging

from tfpar.cluster.description import Cluster
from tfpar.cost.pricer import Pricer
from tfpar.ir.collection import collection_paused
from tfpar.ir.traits import REGIONS
from tfpar.plans import Plan
from tfpar.search.meshes import shapes
from tfpar.search.model.folded_model import FoldedModel, folded_model
from tfpar.search.problem import Problem
from tfpar.search.rhino import RhinoPlanner
from tfpar.search.tap.planner import TapPlanner

logger = logging.getLogger("tfpar")

MAX_REGION_SHARE = 0.1
"""The part of a step that may be spent in loops and branches, which Rhino leaves to propagation."""

SECONDS_PER_AXIS = 5e-5
"""What Rhino's planner takes for an op along a mesh axis, times the root of the number of ops: what
its programs take grows faster than they do (empirical, on a slow core)."""

SEARCH_SECONDS = 30.0
"""What a search may take, in seconds, where nothing is said."""


@dataclasses.dataclass(eq=False)
class AutoPlanner:
    """Rhino's planner, which decides every op, unless something speaks for another one:

    * much of the step is spent in loops or branches: TAP's, which prices them as they are laid;
    * the graph is so large, folded, that Rhino's would take longer than the budget (30 s where
      nothing is said): TAP's, which has its first plan at once.

    The plan says who found it (`Plan.planner`), the log of `tfpar` says why.
    """

    name: str = "auto"

    def solve(self, problem: Problem) -> Plan:
        """The plan of the planner that is picked.

        Raises:
            PlanError: no plan satisfies the constraints.
        """
        deadline = problem.budget.start()
        with collection_paused():
            model = folded_model(problem, 2)
            planner, why = self.pick(problem, model)
            logger.info("planner='auto' takes the %s planner: %s", planner.name, why)
            return planner.search(problem, model, deadline)

    def pick(self, problem: Problem, model: FoldedModel) -> tuple[TapPlanner | RhinoPlanner, str]:
        """The planner for `problem`, whose folded model is `model`, and why."""
        inside = part_in_regions(model, problem.cluster)
        if inside > MAX_REGION_SHARE:
            return TapPlanner(), f"{inside:.0%} of the step is spent in loops or branches"
        ops = len(model.prepared.graph.ops)
        split = [sum(n > 1 for n in mesh.shape) for mesh, _ in shapes(problem.meshes)]
        # Behind each axis but the last two ways go on, seldom three.
        axes = sum(max(1, 2 * n - 1) for n in split)
        needed = SECONDS_PER_AXIS * ops**1.5 * axes
        given = SEARCH_SECONDS if problem.budget.seconds is None else problem.budget.seconds
        if given < needed:
            why = f"Rhino's would take about {needed:.0f} s for {ops} ops; there are {given:g} s"
            return TapPlanner(), why
        return RhinoPlanner(), f"{ops} ops can be decided one by one"


def part_in_regions(model: FoldedModel, cluster: Cluster) -> float:
    """The part of a step's compute that loops and branches take, on one device."""
    laid = model.on_one_device()
    pricer = Pricer(laid.mesh, cluster, model.roles)
    inside = total = 0.0
    for op, decision in laid.decisions.items():
        terms = pricer.zero()
        pricer.add_op(terms, op, model.prepared.rules[op], decision)
        seconds = float(terms.compute.sum())
        total += seconds
        inside += seconds if op.type in REGIONS else 0.0
    return inside / total if total else 0.0
