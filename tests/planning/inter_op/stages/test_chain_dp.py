"""Stages of units in their order: what a solver would find where there is no other, and soon."""

from __future__ import annotations

import dataclasses
import random

import pytest

from tests.cases import amounts
from tests.planning.inter_op.stages.random_units import (
    assignments,
    least_sent_of_all,
    random_graph,
    random_paces,
    sent,
    taken,
)
from tfpar.planning.inter_op.stages import assign as assign_module
from tfpar.planning.inter_op.stages import stage_ilp
from tfpar.planning.inter_op.stages.assign import assign
from tfpar.planning.inter_op.stages.chain_dp import is_chain
from tfpar.planning.inter_op.stages.memory_budget import InfeasibleAssignment, MemoryBudget
from tfpar.planning.inter_op.stages.units import Flow, Unit, UnitGraph

TOLERANCES = (0.0, 0.1, 0.5)


def random_chain(seed: int, fixed: bool = False) -> tuple[UnitGraph, int]:
    """With skips, ties and what several read, as `random_graph` has them."""
    graph, num_stages = random_graph(seed, fixed)
    rng = random.Random(seed)
    along = (Flow(i, (i + 1,), rng.choice([0, 1, 2, 5])) for i in range(len(graph.units) - 1))
    return dataclasses.replace(graph, flows=(*along, *graph.flows)), num_stages


@pytest.fixture
def no_solver(monkeypatch):
    def build(*_):
        raise AssertionError("a chain takes no integer program")

    monkeypatch.setattr(stage_ilp, "StageIlp", build)


@pytest.mark.parametrize("trials", amounts(30, 150))
@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("unequal", [False, True])
def test_no_assignment_sends_less_and_none_that_sends_as_little_is_faster(
    trials, fixed, unequal, no_solver
):
    solved = 0
    for seed in range(trials):
        graph, num_stages = random_chain(seed, fixed)
        paces = random_paces(seed, num_stages) if unequal else None
        possible = [*assignments(graph, num_stages)]
        if not possible:
            continue
        found = assign(graph, num_stages, paces=paces, tolerance=TOLERANCES[seed % 3])
        assert found.stages in possible and found.gap == 0
        least = least_sent_of_all(graph, num_stages, found.most_seconds, paces)
        assert found.sent_bytes == pytest.approx(least)
        as_little = (s for s in possible if sent(graph, s) <= least * (1 + 1e-9))
        slowest = min(max(taken(graph, s, num_stages, paces)) for s in as_little)
        assert max(found.seconds) == pytest.approx(slowest)
        solved += 1
    assert solved > 0.67 * trials


@pytest.mark.parametrize("trials", amounts(30, 150))
def test_what_devices_have_room_for(trials, no_solver):
    fits = 0
    for seed in range(trials):
        graph, num_stages = random_chain(seed)
        rng = random.Random(seed)
        units = (dataclasses.replace(u, weight_bytes=rng.randint(0, 4)) for u in graph.units)
        graph = dataclasses.replace(graph, units=tuple(units))
        limits = [float(rng.randint(1, 8)) for _ in range(num_stages)]
        rooms = MemoryBudget(range(num_stages), limits, 1.0, [0.0] * num_stages)
        possible = [s for s in assignments(graph, num_stages) if rooms.have_room(graph, s)]
        if not possible:
            with pytest.raises(InfeasibleAssignment):
                assign(graph, num_stages, rooms=rooms)
            continue
        found = assign(graph, num_stages, rooms=rooms, tolerance=10.0)
        assert found.stages in possible
        assert found.sent_bytes == min(sent(graph, s) for s in possible)
        fits += 1
    assert trials / 8 < fits < trials


def test_what_is_no_chain():
    units = tuple(Unit(name, 1.0) for name in "abc")
    chain = UnitGraph(units, (Flow(0, (1, 2), 1.0), Flow(1, (2,), 1.0)))
    assert is_chain(chain)
    assert not is_chain(UnitGraph(units, (Flow(0, (2,), 1.0), Flow(1, (2,), 1.0))))
    shared = MemoryBudget((0, 1, 0), (1.0, 1.0), 1.0, [1.0] * 3)
    assert not is_chain(chain, shared), "what a stage may hold hangs on another"


def near_chain(count: int, tower: int) -> UnitGraph:
    """Units in a row, some of which another tower of units lies beside, as in an encoder and a
    decoder."""
    rng = random.Random(count)
    row = [Flow(i, (i + 1,), float(rng.randint(1, 9))) for i in range(count - 1)]
    beside = [Flow(i, (i + 2,), 1.0) for i in range(0, tower, 2)]
    units = tuple(Unit(f"unit {i}", float(rng.randint(1, 3))) for i in range(count))
    return UnitGraph(units, (*(f for f in row if f.source % 7), *beside))


def test_a_large_program_is_left_to_the_order_of_the_units(no_solver):
    graph = near_chain(200, 20)
    assert not is_chain(graph)
    found = assign(graph, 8, tolerance=0.3)
    assert list(found.stages) == sorted(found.stages)
    assert max(found.seconds) <= found.most_seconds
    assert found.gap == float("inf"), "there may be something better"


@pytest.mark.parametrize("trials", amounts(30, 150))
def test_of_units_in_their_order_nothing_sends_less(trials, monkeypatch):
    """Also where other orders would do, and some are fixed."""
    monkeypatch.setattr(assign_module, "SOLVED", 0)
    solved = 0
    for seed in range(trials):
        graph, num_stages = random_graph(seed, fixed=seed % 2 == 0)
        in_order = [s for s in assignments(graph, num_stages) if list(s) == sorted(s)]
        if not in_order:
            continue
        found = assign(graph, num_stages, tolerance=TOLERANCES[seed % 3])
        slowest = found.most_seconds
        possible = [s for s in in_order if max(taken(graph, s, num_stages)) <= slowest]
        if possible:
            assert found.sent_bytes <= min(sent(graph, s) for s in possible)
            solved += 1
    assert solved > 0.4 * trials
