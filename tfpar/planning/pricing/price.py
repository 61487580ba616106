"""The price of a plan: how its whole step, its pieces, its stages and its shares come together.

    price_plan(plan, problem, cluster, batch_size)      the plan, with what it costs as it runs

A step is partitioned once (`StepPricer`), and priced in any number of pieces, in any schedule of
its stages, on any machines of as many ranks. Searches price what changes of a plan; what they find
costs what it does here.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Hashable, Sequence
from typing import NamedTuple, Protocol

from tfpar.cluster.description import Cluster
from tfpar.cost.cost import Cost
from tfpar.cost.evaluation import evaluate
from tfpar.cost.pipeline_cost import PipelineCost
from tfpar.cost.sub_batch_cost import chunked_cost, microbatched_cost
from tfpar.ir.collection import collection_paused
from tfpar.ir.roles import BACKWARD, Roles
from tfpar.pipeline.statistics import BatchStatistics
from tfpar.planning.folding.folded_model import folded_model
from tfpar.planning.folding.folded_plan import folded_anchors
from tfpar.planning.inter_op.stages.pipeline_pricing import PipelinePricer
from tfpar.planning.memory.plan_transforms import apply_plan_transforms
from tfpar.planning.pricing.plan_propagation import priced_roles, propagate_transformed
from tfpar.planning.pricing.rank_view import RankView
from tfpar.planning.pricing.sub_batches import SubBatchStep
from tfpar.planning.problem import Problem
from tfpar.plans import Plan
from tfpar.plans.shares import uneven_meshes
from tfpar.propagation.engine import propagate
from tfpar.propagation.partitioned_graph import PartitionedGraph
from tfpar.propagation.uneven_batch import UnevenSplitError, with_own_share
from tfpar.spec import Mesh, UnevenMesh


class StepPricer(Protocol):
    """Pricer of a step that a plan has partitioned, in any pieces and stages."""

    def price(self, plan: Plan, views: Sequence[RankView] = ()) -> Plan:
        """Return `plan`, which has partitioned the step so, with its cost in its pieces or its
        schedule.

        Args:
            views: the ranks of each layout whose pace and shares of the batch count; by default
                each actor runs at its own pace, in equal shares.

        Raises:
            UnevenSplitError: the step does not split in these shares.
            ScheduleError: tasks of its stages wait for each other.
        """
        ...

    def on(self, cluster: Cluster) -> StepPricer:
        """Return the pricer of the same step on other machines of as many ranks."""
        ...


def price_plan(
    plan: Plan, problem: Problem, cluster: Cluster, batch_size: int | None = None
) -> Plan:
    """Price `plan` as it runs.

    Args:
        problem: that it is for, of the ranks of one stage.
        cluster: of all ranks.
        batch_size: of the step, for shares of the batch that are unequal; None: they are equal.

    Raises:
        PlanError: the plan gives an op no stage, or a variable two.
        ScheduleError: tasks of its stages wait for each other.
        TfparError: the cluster has fewer ranks.
    """
    return price_on(make_step_pricer(plan, problem, cluster), plan, cluster, batch_size)


def price_on(step: StepPricer, plan: Plan, cluster: Cluster, batch_size: int | None) -> Plan:
    """Price `plan` by the pricer of its step on a cluster; see `price_plan`."""
    with collection_paused():
        return price_own_shares(step, step.price(plan), cluster, batch_size)


def price_whole(plan: Plan, problem: Problem) -> tuple[Cost, PartitionedGraph]:
    """Price a plan that computes its batch in one piece, without stages; return the partitioned
    graph, too."""
    step = SingleStagePricer.of(plan, problem, problem.cluster)
    return step.price_whole(), step.laid


def make_step_pricer(plan: Plan, problem: Problem, cluster: Cluster) -> StepPricer:
    """Return the pricer of a problem's step, partitioned by `plan`; arguments and errors as of
    `price_plan`."""
    if plan.stages is None:
        return SingleStagePricer.of(plan, problem, cluster)
    return PipelineStepPricer(PipelinePricer.of(plan, problem), cluster)


@dataclasses.dataclass(frozen=True, eq=False)
class SingleStagePricer:
    """Pricer of a step of which each rank runs all ops.

    Attributes:
        laid: its partitioned graph under a plan.
        roles: of its graph.
        cluster: the machines.
        state_ratio: see `evaluate`.
        pieces: what cuts it in chunks or microbatches; None if it does not train.
    """

    laid: PartitionedGraph
    roles: Roles
    cluster: Cluster
    state_ratio: float | None
    pieces: SubBatchStep | None = None
    _cuts: dict[int, tuple[PartitionedGraph, BatchStatistics]] = dataclasses.field(
        default_factory=dict
    )

    @classmethod
    def of(cls, plan: Plan, problem: Problem, cluster: Cluster) -> SingleStagePricer:
        """Return the pricer of a problem's step, partitioned by `plan`."""
        with collection_paused():
            again = apply_plan_transforms(problem, plan)
            laid = propagate_transformed(plan, again)
            roles = priced_roles(laid, again)
            trains = BACKWARD in roles.phase.values()
            pieces = SubBatchStep.of(plan, again, laid, roles) if trains else None
            return cls(laid, roles, cluster, again.step.state_ratio, pieces)

    @classmethod
    def folded(cls, plan: Plan, problem: Problem) -> SingleStagePricer:
        """Return the pricer of the folded step under a plan of the whole, which is quick."""
        model = folded_model(problem, 2)
        anchors = folded_anchors(plan, problem, model)
        step = problem.with_step(graph=model.prepared.graph, batched=model.batched(problem))
        laid = propagate(model.prepared, plan.mesh, anchors)
        pieces = SubBatchStep(step, anchors, laid, model.roles)
        return cls(laid, model.roles, problem.cluster, step.step.state_ratio, pieces)

    def on(self, cluster: Cluster) -> SingleStagePricer:
        return dataclasses.replace(self, cluster=cluster)

    def price(self, plan: Plan, views: Sequence[RankView] = ()) -> Plan:
        ranks, mesh = views[0] if views else RankView()
        machines = self.cluster.at_pace_of(ranks) if ranks else self.cluster
        laid = self.laid if mesh is None else with_own_share(self.laid, mesh)
        cost = evaluate(laid, machines, self.roles, self.state_ratio)
        if plan.microbatches > 1 and self.pieces is not None:
            cut, own = self._cut(plan.microbatches, mesh)
            cost = microbatched_cost(cost, cut, laid.mesh, machines, self.roles, own)
        elif plan.chunks > 1 and self.pieces is not None:
            cut, _ = self._cut(plan.chunks, mesh)
            cost = chunked_cost(cost, cut, laid.mesh, machines, self.roles)
        return plan.with_findings(cost=cost)

    def price_whole(self) -> Cost:
        """Price the batch in one piece."""
        return evaluate(self.laid, self.cluster, self.roles, self.state_ratio)

    def _cut(self, count: int, mesh: UnevenMesh | None) -> tuple[PartitionedGraph, BatchStatistics]:
        """The step in so many pieces, and the statistics that each has of its own."""
        if count not in self._cuts:
            assert self.pieces is not None, "a step that trains"
            cut = self.pieces.cut(count)
            self._cuts[count] = cut, self.pieces.statistics(cut)
        cut, own = self._cuts[count]
        return (cut if mesh is None else with_own_share(cut, mesh)), own


@dataclasses.dataclass(frozen=True, eq=False)
class PipelineStepPricer:
    """A step in stages.

    Attributes:
        cut: in those of a plan.
        cluster: the machines of all ranks.
    """

    cut: PipelinePricer
    cluster: Cluster

    def on(self, cluster: Cluster) -> PipelineStepPricer:
        return dataclasses.replace(self, cluster=cluster)

    def price(self, plan: Plan, views: Sequence[RankView] = ()) -> Plan:
        before, priced = plan.stages, self.cut.priced(plan, self.cluster, views)
        stages = priced.stages
        if before is None or before.cost is None or stages is None or stages.cost is None:
            return priced
        # What the schedule was picked from is still told.
        cost = dataclasses.replace(stages.cost, schedules=before.cost.schedules)
        return dataclasses.replace(priced, stages=dataclasses.replace(stages, cost=cost))


class ShareAxis(NamedTuple):
    """Axis of one of a plan's layouts along which ranks may have unequal shares of the batch.

    Attributes:
        layout: its number; see `PipelinePlan.layout_of`.
        axis: of its mesh.
        mesh: with the shares of the coordinates; None: they are equal.
    """

    layout: int
    axis: int
    mesh: UnevenMesh | None = None


class ViewedPlan(NamedTuple):
    """Plan that was priced for some ranks of each of its layouts."""

    views: tuple[RankView, ...]
    plan: Plan


def price_along(
    step: StepPricer, plan: Plan, cluster: Cluster, *axes: ShareAxis
) -> list[ViewedPlan]:
    """Price a step of `plan` at each coordinate of the axes of some layouts, one by one: the actors
    of other layouts run at the coordinate that takes them longest.

    Args:
        axes: of different layouts.
    """
    views = [RankView() for _ in plan.by_layout]
    if len(axes) > 1:
        for axis in axes:
            along = _price_views(step, plan, cluster, axis, views)
            slowest = max(along, key=lambda one: layout_seconds(one.plan, axis.layout))
            views[axis.layout] = slowest.views[axis.layout]
    return [one for axis in axes for one in _price_views(step, plan, cluster, axis, views)]


def _price_views(
    step: StepPricer, plan: Plan, cluster: Cluster, axis: ShareAxis, others: Sequence[RankView]
) -> list[ViewedPlan]:
    """The plan priced at each coordinate of one axis.

    Args:
        others: the ranks of each layout; of that of the axis they are not looked at.
    """
    parts = actor_clusters(plan, cluster, axis.layout)
    known: dict[Hashable, Plan] = {}
    found = []
    for at, ranks in enumerate(ranks_along(plan.by_layout[axis.layout].mesh, axis.axis)):
        own = None if axis.mesh is None else axis.mesh.seen_from(ranks[0])
        share = None if axis.mesh is None else axis.mesh.shares[at]
        views = (*others[: axis.layout], RankView(ranks, own), *others[axis.layout + 1 :])
        key: Hashable = share, tuple(part.at_pace_of(ranks) for part in parts)
        if key not in known:
            known[key] = step.price(plan, views)
        found.append(ViewedPlan(views, known[key]))
    return found


def price_own_shares(
    step: StepPricer, plan: Plan, cluster: Cluster, batch_size: int | None
) -> Plan:
    """Price `plan`, which was priced in equal shares, in those that it has.

    Args: as of `planning.pricing.batch_shares.optimize_shares`.
    """
    along = _price_shares(step, plan, cluster, batch_size)
    return combine_slowest([one.plan for one in along]) if along else plan


def slowest_views(
    step: StepPricer, plan: Plan, cluster: Cluster, batch_size: int | None
) -> Sequence[RankView]:
    """Return the ranks of each layout of a plan that take longest with its shares, and the meshes
    as they see them; of equal shares, none.

    Args: as of `planning.pricing.batch_shares.optimize_shares`.
    """
    along = _price_shares(step, plan, cluster, batch_size)
    return max(along, key=lambda one: seconds_of(one.plan)).views if along else ()


def _price_shares(
    step: StepPricer, plan: Plan, cluster: Cluster, batch_size: int | None
) -> list[ViewedPlan]:
    """The plan priced at each coordinate of its unequal shares; nothing where they are equal, or
    the step does not split so in some layout."""
    axes: list[ShareAxis] = []
    along: list[ViewedPlan] = []
    for number, one in enumerate(plan.by_layout):
        meshes = uneven_meshes(one, batch_size)
        for mesh in meshes:
            axis = ShareAxis(number, mesh.uneven_axis, mesh)
            with contextlib.suppress(UnevenSplitError):
                along = price_along(step, plan, cluster, axis)
                axes.append(axis)
                break
        else:
            if meshes:
                return []
    return along if len(axes) < 2 else price_along(step, plan, cluster, *axes)


def ranks_along(mesh: Mesh, axis: int) -> list[list[int]]:
    """Return the ranks of each coordinate of `axis`."""
    found: list[list[int]] = [[] for _ in range(mesh.shape[axis])]
    for rank in range(mesh.size):
        found[mesh.coordinates(rank)[axis]].append(rank)
    return found


def actor_clusters(plan: Plan, cluster: Cluster, layout: int = 0) -> list[Cluster]:
    """Return the subcluster of each actor with a layout, by its number."""
    if plan.stages is None:
        return [cluster]
    groups = plan.stages.groups(plan.mesh.size)
    numbers = plan.stages.layout_of or [0] * len(groups)
    return [cluster.part(group) for group, n in zip(groups, numbers, strict=True) if n == layout]


SIZES = (
    "weight_bytes",
    "state_bytes",
    "gradient_bytes",
    "activation_bytes",
    "copied_bytes",
    "gathered_bytes",
    "live_bytes",
    "host_slot_bytes",
    "host_activation_bytes",
)
"""The fields of a `Cost` that say what a rank stores."""


def combine_slowest(along: Sequence[Plan]) -> Plan:
    """Combine plans to one with the times of the slowest and the most memory."""
    found = max(along, key=seconds_of)
    fullest = cost_of(max(along, key=_filled))
    cost = dataclasses.replace(cost_of(found), **{n: getattr(fullest, n) for n in SIZES})
    stages = found.stages
    if stages is not None:
        stages = dataclasses.replace(
            stages, cost=_slowest_stages(list(map(pipeline_cost_of, along)))
        )
    return dataclasses.replace(found, stages=stages).with_findings(cost=cost)


def _slowest_stages(along: Sequence[PipelineCost]) -> PipelineCost:
    """The same stage by stage; the most memory is what leaves least of what a rank may hold."""
    slow = max(along, key=lambda cost: cost.seconds)
    sizes = (
        *("in_flight", "fixed_bytes", "kept_bytes", "peak_bytes", "peak_task", "limit_bytes"),
        *("host_bytes", "host_limit_bytes"),
    )
    stages = []
    for stage, own in enumerate(slow.stages):
        each = [cost.stages[stage] for cost in along]
        fullest = max(each, key=lambda share: (share.excess_bytes, share.peak_bytes))
        stages.append(dataclasses.replace(own, **{n: getattr(fullest, n) for n in sizes}))
    return dataclasses.replace(slow, stages=tuple(stages))


def _filled(plan: Plan) -> float:
    """The bytes that a rank stores; in stages, beyond what it may."""
    if plan.stages is None:
        return cost_of(plan).memory_bytes
    staged = pipeline_cost_of(plan)
    return staged.stages[staged.fullest].excess_bytes


def pipeline_cost_of(plan: Plan) -> PipelineCost:
    """Return the cost of a plan in stages that was priced."""
    assert plan.stages is not None and plan.stages.cost is not None, "a plan that was priced"
    return plan.stages.cost


def cost_of(plan: Plan) -> Cost:
    assert plan.cost is not None, "a plan that was priced"
    return plan.cost


def seconds_of(plan: Plan) -> float:
    return cost_of(plan).seconds


def layout_seconds(plan: Plan, layout: int) -> float:
    """Return the seconds by which shares of the batch are compared in a layout, by its number.

    They are those of a step, if all actors have that layout. Else one of another may be the
    slowest, whatever the shares: they are those in which the busiest actor of the layout works.
    """
    if plan.stages is None or not plan.stages.layouts:
        return seconds_of(plan)
    actors = plan.stages.schedule.actors
    busy: dict[int, float] = {}
    for actor, stage in zip(actors, pipeline_cost_of(plan).stages, strict=True):
        if plan.stages.layout_of[actor] == layout:
            tasks = plan.microbatches * (stage.forward_s + stage.backward_s)
            once = stage.update_s + stage.reduction_s
            busy[actor] = busy.get(actor, 0.0) + tasks + once
    return max(busy.values())
