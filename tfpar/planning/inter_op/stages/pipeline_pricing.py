"""Pricing of plans with stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from tfpar.cluster.description import Cluster
from tfpar.cost.cost import Cost
from tfpar.cost.pipeline_cost import PipelineCost
from tfpar.cost.pipeline_cost_model import PipelineCostModel, bottleneck_cost, staged_cost
from tfpar.cost.schedule_search import compare_schedules, fits_at_all
from tfpar.cost.task_partition import TaskPartition
from tfpar.ir.collection import collection_paused
from tfpar.ir.graph import Graph, Op
from tfpar.ir.step import StepGraph
from tfpar.pipeline.schedule import Schedule
from tfpar.pipeline.stage_partition import sent_whole
from tfpar.planning.memory.plan_transforms import apply_plan_transforms
from tfpar.planning.pricing.plan_propagation import priced_roles, propagate_transformed
from tfpar.planning.pricing.rank_view import RankView
from tfpar.planning.pricing.sub_batches import SubBatchStep
from tfpar.planning.problem import Problem
from tfpar.plans import Plan
from tfpar.propagation.uneven_batch import with_own_share
from tfpar.spec import UnevenMesh


@dataclasses.dataclass(frozen=True, eq=False)
class PipelinePricer:
    """A plan's step in its stages, cut once: it is then priced in any schedule and microbatches, on
    any machines.

    Attributes:
        steps: in each layout, that of the plan first; see `PipelinePlan.layouts`. One that does not
            train has the forward tasks of a schedule.
        stages: of every op of each.
    """

    steps: Sequence[SubBatchStep]
    stages: Sequence[Mapping[Op, int]]
    _staged: dict[tuple[int, int, int, UnevenMesh | None], TaskPartition] = dataclasses.field(
        default_factory=dict
    )

    @classmethod
    def of(cls, plan: Plan, problem: Problem) -> PipelinePricer:
        """Return the pricer of the step of `plan`.

        Raises:
            PlanError: the plan gives an op no stage, or a variable two.
        """
        return problem.step.graph_memo.of(PipelinePricerMemo).of(plan, problem)

    def prices(
        self,
        plan: Plan,
        cluster: Cluster,
        views: Sequence[RankView] = (),
    ) -> PipelineCostModel:
        """Return the cost model of its stages with the microbatches and actors of `plan`.

        Args:
            plan: that was cut, maybe with another schedule, or with recomputed stages.
            cluster: of all ranks.
            views: the ranks of each layout whose pace and shares of the batch count; by default
                all, in equal shares.

        Raises:
            UnevenSplitError: the step does not split in these shares.
            TfparError: the cluster has fewer ranks.
        """
        assert plan.stages is not None, "a plan with stages"
        stages, schedule = plan.stages, plan.stages.schedule
        views = views or [RankView()] * len(self.steps)
        numbers = stages.layout_of or [0] * stages.num_actors
        with collection_paused():
            staged, *others = (
                self._in_stages(number, schedule, view.mesh) for number, view in enumerate(views)
            )
            found = PipelineCostModel.of(
                staged,
                schedule.actors,
                cluster,
                stages.recompute,
                stages.ranks,
                [views[number].ranks for number in numbers],
                others,
                stages.layout_of,
            )
        limits = tuple(map(min, found.limits, stages.memory_limits or found.limits))
        return dataclasses.replace(found, limits=limits)

    def _in_stages(self, number: int, schedule: Schedule, mesh: UnevenMesh | None) -> TaskPartition:
        """The step in a layout, in the stages and microbatches of a schedule; see `prices`."""
        key = number, schedule.num_microbatches, schedule.num_stages, mesh
        if key not in self._staged:
            if mesh is None:
                found = _in_stages(self.steps[number], self.stages[number], schedule)
            else:
                found = self._in_stages(number, schedule, None)
                found = dataclasses.replace(found, laid=with_own_share(found.laid, mesh))
            self._staged[key] = found
        return self._staged[key]

    def priced(
        self,
        plan: Plan,
        cluster: Cluster,
        views: Sequence[RankView] = (),
    ) -> Plan:
        """Price `plan`; arguments and errors as of `prices`.

        Raises:
            ScheduleError: tasks wait for each other.
        """
        assert plan.stages is not None, "a plan with stages"
        schedule, prices = plan.stages.schedule, self.prices(plan, cluster, views)
        timeline = prices.run(schedule)
        cost = bottleneck_cost(prices, schedule, timeline)
        return _with_cost(plan, cost, staged_cost(prices, schedule, timeline))

    def scheduled(self, plan: Plan, cluster: Cluster) -> Plan:
        """Price `plan` in the schedule that is simulated to be fastest, of those that fit into
        memory, or as it is if none can fit; arguments and errors as of `prices`."""
        assert plan.stages is not None, "a plan with stages"
        schedule, prices = plan.stages.schedule, self.prices(plan, cluster)
        # Forward tasks have one order on each actor.
        if not prices.trains or not fits_at_all(prices, schedule.actors):
            return self.priced(plan, cluster)
        with collection_paused():
            compared = compare_schedules(
                prices,
                schedule.actors,
                schedule.num_microbatches,
                halves=not plan.stages.recompute,
            )
            schedule = compared[0].schedule
            timeline = prices.run(schedule)
        cost = staged_cost(prices, schedule, timeline)
        cost = dataclasses.replace(cost, schedules=tuple(other.price for other in compared))
        stages = dataclasses.replace(plan.stages, schedule=schedule)
        plan = dataclasses.replace(plan, stages=stages)
        return _with_cost(plan, bottleneck_cost(prices, schedule, timeline), cost)


MOST_CUT = 4
"""Number of cut plans that are kept: they are priced one after the other."""


class PipelinePricerMemo:
    """Plans of a step, each cut once, whatever schedules and microbatches it is priced in."""

    def __init__(self) -> None:
        self._kept: list[tuple[tuple[object, ...], PipelinePricer]] = []

    def of(self, plan: Plan, problem: Problem) -> PipelinePricer:
        """Return the pricer of `PipelinePricer.of`, one for problems that differ in machines and in
        what is asked for."""
        assert plan.stages is not None, "a plan with stages"
        key = (
            problem.step.graph,
            problem.step.batched,
            problem.step.zero_cost_ops,
            plan.mesh,
            plan.batch_axes,
            plan.recompute,
            plan.offloaded,
            plan.tensors,
            plan.ops,
            {name: variable.laid for name, variable in plan.variables.items()},
            plan.stages.num_stages,
            plan.stages.scopes,
            plan.stages.owners,
            [dataclasses.replace(layout, shares={}) for layout in plan.stages.layouts],
            problem.step.compression,
            problem.step.jit_compile,
            problem.batch.batch_statistics,
            problem.step.state_ratio,
        )
        known = next((cut for other, cut in self._kept if other == key), None)
        if known is None:
            with collection_paused():
                known = PipelinePricer(*cut_in_stages(plan, problem))
            self._kept = [(key, known), *self._kept][:MOST_CUT]
        return known


def price_best_schedule(plan: Plan, problem: Problem, cluster: Cluster) -> Plan:
    """Price `plan` in the schedule that is simulated to be fastest, of those that fit into memory.

    Args and errors: as of `planning.pricing.price.price_plan`; the plan's schedule says which
    stages lie together.
    """
    return PipelinePricer.of(plan, problem).scheduled(plan, cluster)


def _with_cost(plan: Plan, cost: Cost, staged: PipelineCost) -> Plan:
    assert plan.stages is not None, "a plan with stages"
    stages = dataclasses.replace(plan.stages, cost=staged)
    return dataclasses.replace(plan, stages=stages).with_findings(cost=cost)


def cut_in_stages(plan: Plan, problem: Problem) -> tuple[list[SubBatchStep], list[dict[Op, int]]]:
    """Cut the problem's step for the stages of `plan`, and return it in each layout, with the stage
    of every op.

    Raises:
        PlanError: the plan gives an op no stage, or a variable two.
    """
    assert plan.stages is not None, "a plan with stages"
    problem = apply_plan_transforms(problem, plan)
    step = StepGraph(problem.step.graph, len(problem.step.graph.inputs))
    stage = plan.stages.cut(step)
    ops = {op.name: op for op in step.graph.ops}
    batched = [tensor in problem.step.batched for tensor in problem.step.graph.inputs]
    problem = problem.with_step(
        graph=step.graph,
        batched=frozenset(
            t for t, is_cut in zip(step.graph.inputs, batched, strict=True) if is_cut
        ),
        zero_cost_ops=frozenset(ops[op.name] for op in problem.step.zero_cost_ops),
    )
    whole = sent_whole(step.graph, stage)
    steps: list[SubBatchStep] = []
    for each in plan.by_layout:
        laid = propagate_transformed(each, problem, whole)
        steps.append(SubBatchStep.of(each, problem, laid, priced_roles(laid, problem)))
    return steps, [_with_new_ops(found.whole.graph, stage) for found in steps]


def _with_new_ops(graph: Graph, stage: Mapping[Op, int]) -> dict[Op, int]:
    """The stage of every op: those that were added lie where they are read."""
    readers = graph.consumers()
    found = dict(stage)
    for op in reversed(graph.ops):
        if op not in found:
            reading = (found[r] for t in op.outputs for r in readers.get(t, ()))
            found[op] = max(reading, default=0)
    return found


def _in_stages(step: SubBatchStep, stage: Mapping[Op, int], schedule: Schedule) -> TaskPartition:
    cut = step.cut(schedule.num_microbatches)
    ratio = step.problem.step.state_ratio
    own = step.statistics(cut)
    return TaskPartition(cut, step.roles, stage, schedule.num_stages, ratio, own)
