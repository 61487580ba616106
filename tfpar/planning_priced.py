"""How a plan lays the graph of its problem, what the step then takes, and shares of its batch."""

from __future__ import annotations

from tfpar.cluster.description import Cluster
from tfpar.cost.cost import Cost
from tfpar.cost.evaluate import evaluate
from tfpar.ir.collection import collection_paused
from tfpar.ir.roles import Roles
from tfpar.plans import Plan
from tfpar.propagation.engine import propagate
from tfpar.propagation.partitioned import PartitionedGraph
from tfpar.propagation.prepared import prepare
from tfpar.search.model.folded_model import folded_model
from tfpar.search.parts import StepInParts
from tfpar.search.problem import Problem, step_anchors
from tfpar.search.recompute import recomputed_problem
from tfpar.search.shares import Priced, StepOfStages, WholeStep, in_shares, uneven_axes
from tfpar.search.stages.priced import CutPlan


def lay_out(plan: Plan, problem: Problem) -> PartitionedGraph:
    """The whole graph of a problem as `plan` lays it, with what it computes again."""
    return laid_graph(plan, recomputed_problem(problem, plan.recompute))


def laid_graph(plan: Plan, problem: Problem) -> PartitionedGraph:
    """The whole graph of a problem as `plan` lays it, which has what it computes again already."""
    with collection_paused():
        laid = propagate(prepare(problem.graph), plan.mesh, step_anchors(plan, problem))
        laid.wire_dtypes = Roles.of(problem.graph, compression=problem.compression).wire_dtypes
        return laid


def price_whole(plan: Plan, problem: Problem) -> tuple[Cost, PartitionedGraph]:
    """What a plan costs that computes its batch in one piece, and the graph as it lays it."""
    again = recomputed_problem(problem, plan.recompute)
    laid = laid_graph(plan, again)
    roles = priced_roles(laid, again)
    return evaluate(laid, problem.cluster, roles, problem.state_ratio), laid


def with_shares(plan: Plan, problem: Problem, cluster: Cluster, batch_size: int | None) -> Plan:
    """`plan` with shares of the batch by the speeds of ranks, where that is faster.

    Args:
        plan: without any, and priced so.
        cluster: of all ranks.
    """
    machines = problem.cluster if plan.stages is None else cluster
    if batch_size is None or plan.cost is None or not uneven_axes(plan, machines):
        return plan
    with collection_paused():
        step = step_by_rank(plan, problem, machines)
        if step is None:
            return plan
        return in_shares(step, plan, machines, batch_size, problem.memory_limit)


def step_by_rank(plan: Plan, problem: Problem, cluster: Cluster) -> Priced | None:
    """The step of a problem, to be priced at the rates of single ranks; None if it is to be in
    parts, and does not train.

    Args:
        cluster: of all ranks.
    """
    if plan.stages is not None:
        cut = CutPlan.of(plan, problem)
        return None if cut is None else StepOfStages(cut, cluster)
    again = recomputed_problem(problem, plan.recompute)
    pieces = plan.chunks * plan.microbatches
    if pieces == 1:
        laid = laid_graph(plan, again)
        return WholeStep(laid, priced_roles(laid, again), cluster, problem.state_ratio)
    step = StepInParts.of(plan, again, step_anchors(plan, again))
    if step is None:
        return None
    parts = step.cut(pieces)
    ratio, own = problem.state_ratio, step.statistics(parts)
    return WholeStep(step.whole, step.roles, cluster, ratio, parts, own)


def priced_roles(laid: PartitionedGraph, problem: Problem) -> Roles:
    """The roles of the ops of a problem's whole graph, of which stand-ins cost nothing."""
    stand_ins = dict.fromkeys(problem.stand_ins, 0)
    return Roles.of(laid.graph, times=stand_ins, compression=problem.compression)


def cost_on_one_device(problem: Problem, cluster: Cluster) -> Cost:
    """What the step costs on one device of `cluster`, with nothing split."""
    with collection_paused():
        model = folded_model(problem, 2)
        return evaluate(model.on_one_device(), cluster, model.roles, problem.state_ratio)
