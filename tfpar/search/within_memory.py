"""The planner's plan that fits into the memory of a device (TAP §IV-H, Rhino §4.4)."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from tfpar.cost.cost import Cost
from tfpar.ir.graph import Graph
from tfpar.ir.roles import Roles
from tfpar.ir.traits import FREE
from tfpar.plans import Offloaded, Plan
from tfpar.search.as_planned import as_kept
from tfpar.search.objective import UNCERTAINTY
from tfpar.search.offload import chosen, offloaded_problem
from tfpar.search.offloaded_plans import with_offloaded_activations, with_offloaded_slots
from tfpar.search.problem import Planner, Problem
from tfpar.search.recompute import Blocks, recomputed_problem
from tfpar.search.slots import saved_by_split_slots, with_split_slots
from tfpar.search.so_far import MakePlan, Offer

LEAST_SAVING = 0.01
"""The part of all activations that a repeated block has to save to be worth a search of its own
(empirical)."""

HOPELESS = 1.5
"""How many times the memory of a device a rank would have to store at least for a search of plans
that fit to be left out: what is stored at least is known to about that (views share memory)."""


def solve_within_memory(problem: Problem, planner: Planner) -> Plan:
    """The planner's plan, with what it takes to fit.

    If the fastest plan of all does not fit into a device, it does perhaps with its optimizer slots
    split, which costs least (`slots`). Else, unless the user has said what is computed again, plans
    that store less are found, and plans that compute repeated blocks again, the one that saves most
    first, each with its slots split, or in host memory (`offloaded_plans`), where that makes it
    fit; of all these the fastest that fits is taken.

    Raises:
        PlanError: no plan satisfies the constraints.
        SpecError: a pattern that matches no block, or no weight.
    """
    away = Offloaded()
    if problem.offload is not None:
        away = chosen(problem.offload, problem.graph, state_ratio=problem.state_ratio)
    if problem.recompute is not None:
        names = Blocks.of(problem.graph).chosen(problem.recompute)
        plans = [*_solved(problem, planner, names, away)]
        if not names and problem.decides_offload and not any(_fits(p, problem) for p in plans):
            sets = [*itertools.accumulate(_by_saving(problem), initial=())]
            plans += _with_activations_away(fastest_plan(problem, planner), problem, sets[1:])
        return _best(plans, problem)
    return _within_memory(problem, planner, away)


def _within_memory(problem: Problem, planner: Planner, away: Offloaded) -> Plan:
    """The same where memory decides what is computed again; `away` lies in host memory."""
    stored = offloaded_problem(problem, away)
    fastest = fastest_plan(stored, planner)
    if not problem.excess_in_parts(fastest.cost):
        return dataclasses.replace(fastest, offloaded=away)
    split = fastest_with_split_slots(stored, planner)
    if split is not None and _fits(split, problem) and _is_near(split, fastest):
        return dataclasses.replace(split, offloaded=away)
    sets = [*itertools.accumulate(_by_saving(problem), initial=())]
    *some, most = sets
    plans: list[Plan] = []
    for names in some:
        if least_bytes(as_kept(problem, names, away)) <= HOPELESS * problem.memory_limit:
            plans += _solved(problem, planner, names, away)
    plans += _solved(problem, planner, most, away)
    if problem.decides_offload:
        plans += _with_activations_away(fastest, problem, sets[1:])
    best = _best(plans, problem)
    return dataclasses.replace(best, cut_short=best.cut_short or fastest.cut_short)


def _may_fit_with_split_slots(plan: Plan, problem: Problem) -> bool:
    """Whether split slots may be what makes a plan fit."""
    return 0 < problem.excess_in_parts(plan.cost) <= saved_by_split_slots(plan, problem)


def _fits(plan: Plan, problem: Problem) -> bool:
    return not problem.excess_in_parts(plan.cost)


def _is_near(plan: Plan, other: Plan) -> bool:
    """Whether predictions cannot tell that a priced plan is slower than another."""
    assert plan.cost is not None and other.cost is not None, "plans that were priced"
    return plan.cost.seconds <= other.cost.seconds * (1 + UNCERTAINTY)


def _best(plans: Sequence[Plan], problem: Problem) -> Plan:
    """The fastest of those that fit, or that of which least is missing."""

    def key(plan: Plan) -> tuple[float, float]:
        return problem.excess_in_parts(plan.cost), plan.cost.seconds if plan.cost else 0.0

    cut_short = any(plan.cut_short for plan in plans)
    return dataclasses.replace(min(plans, key=key), cut_short=cut_short)


def fastest_plan(problem: Problem, planner: Planner) -> Plan:
    """The planner's fastest plan of all, whatever it stores; it is searched once."""
    asked = problem.aiming(memory_limit=math.inf)
    return problem.known.get(
        ("fastest", planner, tuple(problem.meshes)), lambda: planner.solve(asked)
    )


def fastest_with_split_slots(problem: Problem, planner: Planner) -> Plan | None:
    """The same with its optimizer slots split, where that may be what makes it fit; it is priced
    once."""
    plan = fastest_plan(problem, planner)
    if not _may_fit_with_split_slots(plan, problem):
        return None
    key = "fastest, slots split", planner, tuple(problem.meshes)
    return problem.known.get(key, lambda: with_split_slots(plan, problem))


def _solved(
    problem: Problem, planner: Planner, names: tuple[str, ...], away: Offloaded
) -> Iterator[Plan]:
    """The planner's plans that compute these blocks again and have `away` in host memory: the one
    that it finds for the memory that there is, and others where that is not the fastest of all.

    A planner splits weights for what slots take: the fastest plan may fit with its slots split or
    in host memory instead. And one that looks for fast plans may miss one that just fits: then the
    one that it finds to store least is tried.
    """
    again = as_kept(problem, names, away)
    if problem.offer is not None:
        again = again.telling(_kept_so(names, away, problem.offer))

    def named(plan: Plan) -> Plan:
        offloaded = dataclasses.replace(away, slots=plan.offloaded.slots or away.slots)
        return dataclasses.replace(plan, recompute=names, offloaded=offloaded)

    plan = planner.solve(again)
    yield named(plan)
    fastest = fastest_plan(again, planner)
    if _fits(plan, again) and (fastest.cost is None or _is_near(plan, fastest)):
        return
    found = [plan]
    lighter = [fastest_with_split_slots(again, planner)]
    if _may_fit_with_split_slots(plan, again):
        lighter.append(with_split_slots(plan, again))
    lighter.append(_with_slots_away(fastest, again))
    found += [one for one in lighter if one is not None]
    if not any(_fits(one, again) for one in found):
        least = planner.solve(again.aiming(memory_limit=0.0))
        # Also where they are only nearer to what fits.
        lightest = least, with_split_slots(least, again), _with_slots_away(least, again)
        found += [one for one in lightest if one is not None]
    yield from map(named, found[1:])


def _with_slots_away(plan: Plan, problem: Problem) -> Plan | None:
    """`plan` with slots in host memory, split before: each rank then moves a part of them."""
    if not problem.decides_offload:
        return None  # nothing is priced in vain
    return with_offloaded_slots(with_split_slots(plan, problem) or plan, problem)


def _with_activations_away(
    plan: Plan, problem: Problem, choices: Sequence[tuple[str, ...]]
) -> Iterator[Plan]:
    """`plan` with what blocks keep in host memory, of as few of `choices` as it takes to fit, and
    with slots there too if it is not enough."""
    found = None
    for blocks in choices:
        found = with_offloaded_activations(plan, problem, blocks)
        if found is not None and _fits(found, problem):
            break
    if found is not None:
        yield found
        more = None if _fits(found, problem) else _with_slots_away(found, problem)
        if more is not None:
            yield more


def _kept_so(names: tuple[str, ...], away: Offloaded, offer: Offer) -> Offer:
    """`offer` for plans that compute the blocks called so again, and have `away` in host memory."""

    def told(make: MakePlan, cost: Cost | None) -> None:
        def made() -> Plan | None:
            plan = make()
            return plan and dataclasses.replace(plan, recompute=names, offloaded=away)

        offer(made, cost)

    return told


def least_bytes(problem: Problem) -> float:
    """About what a rank stores at least: its even share of weights, slots and kept activations."""
    weights = sum(v.num_bytes for v in problem.graph.variables if v.trainable)
    state = weights * (problem.least_state_ratio or 0.0)
    kept = problem.kept_part * _activation_bytes(problem.graph)
    return (weights + state + kept) / problem.meshes[0].mesh.size


def _by_saving(problem: Problem) -> Iterator[tuple[str, ...]]:
    """The repeated blocks that are worth it, the one that saves most of the whole step first."""
    before = _activation_bytes(problem.graph)
    saved = {
        names: before - _activation_bytes(recomputed_problem(problem, names).graph)
        for names in map(tuple, Blocks.of(problem.graph).repeats)
    }
    for repeat in sorted(saved, key=lambda f: -saved[f]):
        if saved[repeat] > LEAST_SAVING * before:
            yield repeat


def _activation_bytes(graph: Graph) -> int:
    return sum(t.num_bytes for t in Roles.of(graph).activations if t.op.type not in FREE)
