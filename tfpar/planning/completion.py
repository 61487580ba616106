"""Completion of a plan that was found: unequal shares of the batch, the whole step with its specs,
and the baselines that it is compared with."""

from __future__ import annotations

from tfpar.cluster.description import Cluster
from tfpar.cost.evaluation import evaluate
from tfpar.ir.collection import collection_paused
from tfpar.planning.folding.folded_model import folded_model
from tfpar.planning.lower_bound import attach_bound, cost_on_one_device
from tfpar.planning.memory.plan_transforms import apply_plan_transforms
from tfpar.planning.pricing.batch_shares import optimize_shares, uneven_axes
from tfpar.planning.pricing.plan_propagation import propagate_transformed
from tfpar.planning.pricing.price import make_step_pricer
from tfpar.planning.problem import Problem
from tfpar.plans import Candidate, Plan
from tfpar.propagation.engine import propagate
from tfpar.spec import Mesh


def balance_shares(plan: Plan, problem: Problem, cluster: Cluster, batch_size: int | None) -> Plan:
    """Return `plan` with shares of the batch by the speeds of ranks, where that is faster.

    Args:
        plan: without any, and priced so.
        cluster: of all ranks.
    """
    machines = problem.cluster if plan.stages is None else cluster
    if batch_size is None or plan.cost is None or not uneven_axes(plan, machines):
        return plan
    with collection_paused():
        step = make_step_pricer(plan, problem, machines)
        return optimize_shares(step, plan, machines, batch_size, problem.memory_limit)


def attach_partitioned(plan: Plan, problem: Problem, cluster: Cluster) -> Plan:
    """Return the plan with the partitioned graph of its whole step, the baselines, and the bound.

    Args:
        cluster: of all ranks.
    """
    compared = attach_bound(_with_baselines(plan, problem, cluster), problem, cluster)
    problem = apply_plan_transforms(problem, plan)
    whole, *others = (propagate_transformed(each, problem) for each in plan.by_layout)
    return compared.with_partitioned(whole, *others)


def _with_baselines(plan: Plan, problem: Problem, cluster: Cluster) -> Plan:
    """`plan` with what the step costs on one device, and with its batch split over all ranks and
    nothing else."""
    ranks = plan.num_ranks
    with collection_paused():
        alone = cost_on_one_device(problem, cluster)
        model = folded_model(problem, 2)
        mesh, fed = Mesh(("data",), (ranks,)), frozenset(t.op for t in model.batched(problem))
        laid = propagate(model.prepared, mesh, model.data_parallel_anchors(fed))
        split = evaluate(laid, cluster, model.roles, problem.step.state_ratio)
    found = (
        Candidate("one device", alone.seconds, alone.memory_bytes),
        Candidate("data parallel", split.seconds, split.memory_bytes),
    )
    return plan.with_findings(baselines=found[: 1 if ranks == 1 else 2])
