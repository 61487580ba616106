"""Automatic choice of a planner, by the graph and the time budget."""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import NamedTuple

from tfpar.cluster.description import Cluster
from tfpar.cost.pricer import Pricer
from tfpar.ir.collection import collection_paused
from tfpar.ir.traits import REGIONS
from tfpar.planning.folding.folded_model import FoldedModel, folded_model
from tfpar.planning.intra_op.gain import SECONDS_PER_CANDIDATE, allowed_seconds, rhino_seconds
from tfpar.planning.intra_op.rhino import RhinoPlanner
from tfpar.planning.intra_op.tap.planner import TapPlanner
from tfpar.planning.problem import Problem
from tfpar.plans import Plan

logger = logging.getLogger("tfpar")

MAX_REGION_SHARE = 0.1
"""The part of a step that may be spent in loops and branches, which Rhino leaves to propagation."""

SEARCH_SECONDS = 30.0
"""Time limit of a search, in seconds, where none is set."""


class PlannerChoice(NamedTuple):
    """A planner, and why it was picked.

    Attributes:
        is_hurried: with more steps to train it would be another one, which may find better plans.
    """

    planner: TapPlanner | RhinoPlanner
    why: str
    is_hurried: bool = False


@dataclasses.dataclass(eq=False)
class AutoPlanner:
    """Rhino's planner, which decides every op, unless something speaks for another one:

    * much of the step is spent in loops or branches: TAP's, which prices them as they are
      partitioned;
    * the graph is so large, folded, that Rhino's would take longer than the budget (30 s where
      nothing is said), or than training can gain (`planning.intra_op.gain`): TAP's, which has its
      first plan at once, and prices no more candidates than there is time for by the latter.

    The plan says who found it (`Plan.planner`), the log of `tfpar` says why.
    """

    name: str = "auto"

    def solve(self, problem: Problem) -> Plan:
        """Return the plan of the planner that is picked.

        Raises:
            PlanError: no plan satisfies the constraints.
        """
        deadline = problem.aim.budget.start()
        with collection_paused():
            model = folded_model(problem, 2)
            allowed_s = allowed_seconds(problem, model)
            found = self.pick(problem, model, allowed_s)
            logger.info("planner='auto' takes the %s planner: %s", found.planner.name, found.why)
            if isinstance(found.planner, TapPlanner) and math.isfinite(allowed_s):
                deadline.candidates_left = round(allowed_s / SECONDS_PER_CANDIDATE)
            plan = found.planner.search(problem, model, deadline)
        return plan.with_findings(cut_short=plan.findings.cut_short or found.is_hurried)

    def pick(
        self, problem: Problem, model: FoldedModel, allowed_s: float = math.inf
    ) -> PlannerChoice:
        """Pick the planner for `problem`, whose folded model is `model`.

        Args:
            allowed_s: what a search may take by what training can gain.
        """
        inside = part_in_regions(model, problem.cluster)
        if inside > MAX_REGION_SHARE:
            return PlannerChoice(
                TapPlanner(), f"{inside:.0%} of the step is spent in loops or branches"
            )
        ops, needed_s = len(model.prepared.graph.ops), rhino_seconds(problem, model)
        given_s = (
            SEARCH_SECONDS if problem.aim.budget.seconds is None else problem.aim.budget.seconds
        )
        takes = f"Rhino's would take about {needed_s:.1f} s for {ops} ops"
        if given_s < needed_s:
            return PlannerChoice(TapPlanner(), f"{takes}; there are {given_s:g} s")
        if allowed_s < needed_s:
            steps = problem.aim.budget.steps
            why = f"{takes}; training gains less in {steps} steps, so it is given {allowed_s:.1f} s"
            return PlannerChoice(TapPlanner(), why, is_hurried=True)
        return PlannerChoice(RhinoPlanner(), f"{ops} ops can be decided one by one")


def part_in_regions(model: FoldedModel, cluster: Cluster) -> float:
    """Return the part of a step's compute that loops and branches take, on one device."""
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
