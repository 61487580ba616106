"""The planner's plan that fits into the memory of a device (TAP §IV-H, Rhino §4.4)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

from tfpar.planning.memory.blockwise_attention import AttentionOnBlocks, blockwise_problem
from tfpar.planning.memory.fit import MemoryFit, MemoryMove
from tfpar.planning.memory.move_estimates import activation_bytes
from tfpar.planning.memory.offload import offloaded_problem, select_offloads
from tfpar.planning.memory.offload_moves import OffloadActivations
from tfpar.planning.memory.plan_transforms import apply_memory_transforms
from tfpar.planning.memory.recompute import Blocks, recomputed_problem
from tfpar.planning.memory.relayout import Relayout, ShardSlots, fastest_plan
from tfpar.planning.memory.shard_weights import ShardWeights
from tfpar.planning.problem import Planner, Problem
from tfpar.plans import OffloadPlan, Plan

LEAST_SAVING = 0.01
"""The part of all activations that a repeated block has to save to be worth a search of its own
(empirical)."""

HOPELESS = 1.5
"""Ratio of the least memory of a rank to its device's from which plans that fit are not searched:
the least memory is known to about that (views share memory)."""


def solve_under_memory_limit(problem: Problem, planner: Planner) -> Plan:
    """Return the planner's plan, with what it takes to fit.

    Where the fastest plan of all does not fit, moves are tried (`fit`): its optimizer slots are
    sharded, or its weights; layouts that store less are found, with repeated blocks recomputed,
    too, of which the one that saves most is the first; what blocks keep is offloaded; attention
    runs on blocks, with or without all of that. What the user has said of recomputation, offloading
    and attention stays.

    Raises:
        PlanError: no plan satisfies the constraints.
        SpecError: a pattern that matches no block, or no weight.
    """
    away = OffloadPlan()
    if problem.storage.offload is not None:
        away = select_offloads(
            problem.storage.offload, problem.step.graph, state_ratio=problem.step.state_ratio
        )
    fit = MemoryFit(lambda plan: problem.excess_in_parts(plan.cost))

    def moves(of: Problem) -> Iterator[MemoryMove]:
        if problem.storage.recompute is None:
            return _moves(of, planner, away)
        names = Blocks.of(problem.step.graph).recomputed(problem.storage.recompute)
        return _moves_of_choice(of, planner, names, away)

    start = None
    if problem.storage.recompute is None:
        start = fastest_plan(offloaded_problem(problem, away), planner)
        start = dataclasses.replace(start, offloaded=away)
    return fit.run(start, itertools.chain(moves(problem), _on_blocks(problem, moves)))


def _on_blocks(
    problem: Problem, moves: Callable[[Problem], Iterator[MemoryMove]]
) -> Iterator[MemoryMove]:
    """The moves with attention on blocks, if that saves much and is the planner's to decide."""
    if problem.storage.attention is not None:
        return
    blocks = blockwise_problem(problem)
    before = activation_bytes(problem)
    if blocks is not problem and before - activation_bytes(blocks) > LEAST_SAVING * before:
        for move in moves(blocks):
            yield AttentionOnBlocks(problem, blocks, move)


def _moves_of_choice(
    problem: Problem, planner: Planner, names: tuple[str, ...], away: OffloadPlan
) -> Iterator[MemoryMove]:
    """The moves where the user has said which blocks are recomputed."""
    yield Relayout(problem, planner, names, away)
    yield ShardWeights(problem, planner, away, [names])
    if not names and problem.decides_offload:
        yield OffloadActivations(problem, fastest_plan(problem, planner), _choices(problem)[1:])


def _moves(problem: Problem, planner: Planner, away: OffloadPlan) -> Iterator[MemoryMove]:
    """The moves where memory decides what is recomputed; `away` is in host memory."""
    yield ShardSlots(offloaded_problem(problem, away), planner, away)
    none, *blocks = _choices(problem)
    ever_more = [none, *filter(None, [_selective(problem)]), *blocks]
    yield ShardWeights(problem, planner, away, ever_more)
    *some, most = ever_more
    for names in some:
        if (
            least_bytes(apply_memory_transforms(problem, names, away))
            <= HOPELESS * problem.memory_limit
        ):
            yield Relayout(problem, planner, names, away)
    yield Relayout(problem, planner, most, away)
    if problem.decides_offload:
        fastest = fastest_plan(offloaded_problem(problem, away), planner)
        yield OffloadActivations(problem, fastest, blocks)


def _choices(problem: Problem) -> list[tuple[str, ...]]:
    """No repeated block, the one that saves most of the whole step, that and the next, and so on:
    those that are worth it."""
    before = activation_bytes(problem)
    saved = {
        names: before - activation_bytes(recomputed_problem(problem, names))
        for names in map(tuple, Blocks.of(problem.step.graph).repeats)
    }
    worth = [
        names
        for names in sorted(saved, key=lambda names: -saved[names])
        if saved[names] > LEAST_SAVING * before
    ]
    return [*itertools.accumulate(worth, initial=())]


def _selective(problem: Problem) -> tuple[str, ...]:
    """All repeated blocks, as ones that are recomputed selectively; none if that saves little."""
    names = tuple(Blocks.of(problem.step.graph).selective)
    before = activation_bytes(problem)
    after = activation_bytes(recomputed_problem(problem, names)) if names else before
    return names if before - after > LEAST_SAVING * before else ()


def least_bytes(problem: Problem) -> float:
    """About what a rank stores at least: its even share of weights, slots and kept activations."""
    weights = sum(v.num_bytes for v in problem.step.graph.variables if v.trainable)
    state = weights * (problem.least_state_ratio or 0.0)
    kept = problem.batch.kept_part * activation_bytes(problem)
    return (weights + state + kept) / problem.meshes[0].mesh.size
