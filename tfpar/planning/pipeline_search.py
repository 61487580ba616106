"""The search for the plan of a step: with the pipeline that is given, or with the best of all."""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Literal

from tfpar.constraints.stages import check_stages
from tfpar.pipeline import AUTO, Pipeline
from tfpar.planning.drive import PipelineSearch, search_plan
from tfpar.planning.incumbent import SearchInterrupted
from tfpar.planning.inter_op.enumerate_pipelines import EnumeratePipelines, numbers_of_stages
from tfpar.planning.inter_op.placing import GivenPipeline
from tfpar.planning.inter_op.sensitivity import attach_break_even, attach_idle_times
from tfpar.planning.inter_op.stopping import Enough, needs_no_stages, reaches_compute_bound
from tfpar.planning.inter_op.strategy_search import StrategySearch
from tfpar.planning.inter_op.turning_points import attach_turning_points
from tfpar.planning.problem import Problem
from tfpar.planning.request import PlanRequest
from tfpar.planning.step_search import StepEvaluator, StepSearch
from tfpar.plans import Plan
from tfpar.spec import PlanError

logger = logging.getLogger("tfpar")


@dataclasses.dataclass(frozen=True)
class PipelineScope:
    """Scope of a pipeline search: the given pipeline (or none) alone, or all numbers of stages.

    Attributes:
        enough: whether a candidate is good enough to search no more stages; None: only the pipeline
            that is given, or none, is planned.
        why_enough: the message to users on the stages that are not planned; empty: they have not
            asked for pipelines, and get none.
        strategies: how they are searched, other than by enumeration.
    """

    enough: Enough | None = None
    why_enough: str = ""
    strategies: Pipeline | None = None

    @property
    def is_open(self) -> bool:
        """Whether the pipeline is searched."""
        return self.enough is not None


GIVEN = PipelineScope()
"""The pipeline that is given, or none."""

ALL = PipelineScope(
    reaches_compute_bound,
    "what was found is nearly as fast as the work alone, spread evenly over all ranks",
)
"""Pipelines were asked for."""


def select_scope(
    pipeline: Pipeline | Literal["auto"] | None,
    strategies: Pipeline | None,
    is_constrained: bool,
) -> PipelineScope:
    """Select the pipelines that are searched for a training step.

    Without `pipeline=`, pipelines are searched where they can pay: see `needs_no_stages`.
    Constraints speak of a mesh as it is, which is then not divided among stages unasked.

    Args:
        pipeline: that is asked for.
        strategies: how `"auto"` searches them, other than by enumeration.
        is_constrained: constraints or a number of chunks are given.
    """
    if pipeline == AUTO:
        return dataclasses.replace(ALL, strategies=strategies)
    if pipeline is None and not is_constrained:
        return PipelineScope(needs_no_stages)
    return GIVEN


def search_step(
    search: StepSearch, request: PlanRequest, scope: PipelineScope = GIVEN
) -> tuple[Plan, Problem]:
    """Find the best plan for a step, and its problem.

    Args:
        request: of an open scope, with all ranks and no pipeline.

    Raises:
        As `StepSearch`.
    """
    evaluator = StepEvaluator(search, request, scope.enough)
    if scope.enough is None:
        _warn_of_padding(search, request)
        best = search_plan(GivenPipeline(evaluator, request.pipeline), evaluator).best
        return best.plan, best.problem
    check_stages(request.constraints, request.mesh.size)
    search.check_room(request)
    outer: PipelineSearch
    if scope.strategies is not None:
        outer = StrategySearch(evaluator, search, request, scope.strategies)
    else:
        outer = EnumeratePipelines(
            evaluator,
            numbers_of_stages(request.mesh, request.min_stages),
            search.batch_size,
            request.cluster.device.memory_bytes,
            request.mesh.size,
            scope.why_enough,
            search.trains,
        )
    result = search_plan(outer, evaluator)
    plan = result.best.plan
    if any(candidate.num_actors > 1 for candidate in result.others):
        plan = plan.with_findings(bound_s=None)  # it is one of plans without stages
    if scope.why_enough:
        if plan.cost is None:
            raise PlanError(
                f"Planner {plan.planner!r} says nothing of what its plans cost, by which pipelines "
                f"are compared. Give a tap.Pipeline instead of 'auto'."
            )
        with request.progress.at("what ranks wait for"):
            try:
                plan = attach_idle_times(result, request.cluster, search.batch_size)
                plan = attach_turning_points(plan, request.cluster.device.memory_bytes)
                plan = attach_break_even(
                    plan, result, request, search.batch_size, scope.enough, search.trains
                )
            except KeyboardInterrupt:
                found = functools.partial(plan.with_findings, cut_short=True)
                raise SearchInterrupted(found) from None
    return plan, result.best.problem


def _warn_of_padding(search: StepSearch, request: PlanRequest) -> None:
    micro = 1 if request.pipeline is None else request.pipeline.num_microbatches
    batch_size = search.batch_size
    if batch_size is not None and micro > batch_size and search.step.gradients:
        logger.warning(
            f"A batch of {batch_size} is cut in {micro} microbatches: {micro - batch_size} of them "
            f"are all padding, and take as long as the others. Ask for {batch_size} at most."
        )
