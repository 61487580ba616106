"""Transforms of a problem to the step that a plan runs: attention on blocks, recomputed blocks,
separate optimizer slots, offload, and gathered weights."""

from __future__ import annotations

from tfpar.ir.passes.slots import separate_slots
from tfpar.planning.memory.blockwise_attention import problem_with_attention
from tfpar.planning.memory.gathered_weights import gathered_problem
from tfpar.planning.memory.offload import offloaded_problem
from tfpar.planning.memory.recompute import recomputed_problem
from tfpar.planning.problem import Problem
from tfpar.plans import OffloadPlan, Plan


def apply_plan_transforms(problem: Problem, plan: Plan) -> Problem:
    """Return the problem of the step as `plan` runs it. It keeps its fingerprint: that of the
    step."""
    problem = problem_with_attention(problem, plan.attention)
    problem = apply_memory_transforms(problem, plan.recompute, plan.offloaded)
    problem = gathered_problem(problem, plan.variables)
    weights = frozenset(name for name, v in plan.variables.items() if v.slots is not None)
    if not weights or problem.step.state_ratio is None:  # then the graph has the slots themselves
        return problem
    apart = problem.memo.of(ProblemsWithSlotsApart)
    if weights not in apart:
        apart[weights] = _apart(problem, weights)
    return apart[weights].with_settings_of(problem)


def apply_memory_transforms(
    problem: Problem, recompute: tuple[str, ...], offloaded: OffloadPlan
) -> Problem:
    """Return the problem of the step that computes blocks again, and has things in host memory."""
    changed = offloaded_problem(recomputed_problem(problem, recompute), offloaded)
    return gathered_problem(changed, changed.given.variables)


class ProblemsWithSlotsApart(dict[frozenset[str], Problem]):
    """Problems whose graphs have the slots of weights by themselves, by these weights."""


def _apart(problem: Problem, weights: frozenset[str]) -> Problem:
    graph, copies = separate_slots(problem.step.graph, problem.step.zero_cost_ops, weights)
    return problem.with_step(
        graph=graph,
        batched=frozenset(copies[t.op].outputs[t.index] for t in problem.step.batched),
        zero_cost_ops=frozenset(copies[op] for op in problem.step.zero_cost_ops),
    )
