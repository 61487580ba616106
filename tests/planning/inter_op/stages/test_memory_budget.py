"""Units go where devices have room for them."""

from __future__ import annotations

import dataclasses
import random

import pytest

from tests.cases import amounts
from tests.planning.inter_op.stages.random_units import assignments, random_graph, sent, taken
from tfpar.cost import PipelineCost, StageCost
from tfpar.ir import Op
from tfpar.planning.inter_op.stages.assign import assign
from tfpar.planning.inter_op.stages.memory_budget import (
    InfeasibleAssignment,
    MemoryBudget,
    PricedAssignment,
)
from tfpar.planning.inter_op.stages.stage_ilp import SOLVER_SLACK
from tfpar.planning.inter_op.stages.units import Flow, Unit, UnitGraph


def chain(*units: Unit) -> UnitGraph:
    return UnitGraph(units, tuple(Flow(i, (i + 1,), 1.0) for i in range(len(units) - 1)))


def heavy(seed: int, graph: UnitGraph) -> UnitGraph:
    """The same with weights and what is kept, in no proportion to seconds."""
    rng = random.Random(seed)
    units = tuple(
        dataclasses.replace(u, weight_bytes=rng.randint(0, 9), kept_bytes=rng.randint(0, 9))
        for u in graph.units
    )
    return dataclasses.replace(graph, units=units)


def random_rooms(seed: int, graph: UnitGraph, num_stages: int) -> MemoryBudget:
    """Some of which leave no assignment; the first and last stage may share their devices."""
    rng = random.Random(seed)
    actors = [*range(num_stages)]
    if num_stages > 2 and rng.random() < 0.3:
        actors[-1] = 0
    whole = sum(2 * u.weight_bytes + u.kept_bytes for u in graph.units) + 1
    limits = [whole * rng.uniform(0.3, 1.2) for _ in {*actors}]
    return MemoryBudget(actors, limits, 2.0, [rng.choice([0.5, 1.0, 2.0]) for _ in actors])


def held(graph: UnitGraph, rooms: MemoryBudget, stages: tuple[int, ...]) -> list[float]:
    """By the book, of each actor."""
    return [
        sum(
            2.0 * unit.weight_bytes + rooms.per_kept[stage] * unit.kept_bytes
            for unit, stage in zip(graph.units, stages, strict=True)
            if rooms.actors[stage] == actor
        )
        for actor in range(len(rooms.limits))
    ]


def fits(graph: UnitGraph, rooms: MemoryBudget, stages: tuple[int, ...]) -> bool:
    pairs = zip(held(graph, rooms, stages), rooms.limits, strict=True)
    return all(own <= limit * (1 + 1e-6) for own, limit in pairs)


@pytest.mark.parametrize("trials", amounts(30, 150))
def test_what_is_found_fits_and_sends_least_of_what_does(trials):
    refused = limited = 0
    for seed in range(trials):
        graph, num_stages = random_graph(seed)
        graph = heavy(seed, graph)
        rooms = random_rooms(seed, graph, num_stages)
        fitting = [s for s in assignments(graph, num_stages) if fits(graph, rooms, s)]
        if not fitting:
            refused += 1
            with pytest.raises(InfeasibleAssignment):
                assign(graph, num_stages, rooms=rooms)
            continue
        found = assign(graph, num_stages, rooms=rooms)
        assert fits(graph, rooms, found.stages)
        limited += not fits(graph, rooms, assign(graph, num_stages).stages)
        most = found.most_seconds * (1 + SOLVER_SLACK)
        least = min(
            sent(graph, stages)
            for stages in fitting
            if max(taken(graph, stages, num_stages)) <= most
        )
        assert found.sent_bytes == pytest.approx(least, abs=1e-6), seed
    assert min(refused, limited) > trials / 20


def test_weights_without_work_count():
    """A table that takes no time fills the first stage."""
    table, layer = Unit("table", 0.0, 50.0), Unit("layer", 1.0, 10.0)
    graph = chain(table, *[layer] * 6)
    assert assign(graph, 2).stages == (0, 0, 0, 0, 1, 1, 1)
    rooms = MemoryBudget((0, 1), (65.0, 100.0), 1.0, (0.0, 0.0))
    assert assign(graph, 2, rooms=rooms).stages == (0, 0, 1, 1, 1, 1, 1)


def test_no_room_at_all():
    graph = chain(Unit("a", 1.0), Unit("b", 1.0))
    with pytest.raises(InfeasibleAssignment, match="no room for any unit"):
        assign(graph, 2, rooms=MemoryBudget((0, 1), (-1.0, 1.0), 1.0, (1.0, 1.0)))


def share(fixed: float, kept: float, in_flight: int, peak: float, limit: float) -> StageCost:
    times = (1.0, 2.0, 0.1, 0.0, 0.0, 0.0)
    return StageCost((0,), *times, in_flight, fixed, kept, peak, "0B0", limit)


def test_rooms_are_those_of_the_stages_that_were_priced():
    """Of units that stay as they are, each stage is found to hold what it did."""
    units = [Unit("a", 1.0, 10.0, 4.0), Unit("b", 1.0, 20.0, 6.0), Unit("c", 1.0, 30.0, 10.0)]
    graph = chain(*units)
    ops = [Op("Relu", name) for name in "abc"]
    shares = share(90.0, 5.0, 2, 110.0, 100.0), share(90.0, 5.0, 1, 100.0, 300.0)
    laid = PricedAssignment(
        {ops[0]: 0, ops[1]: 0, ops[2]: 1}, (0, 1), PipelineCost(1.0, 0.0, shares)
    )
    rooms = laid.rooms(graph, {op: i for i, op in enumerate(ops)})
    assert rooms.per_weight == pytest.approx(180 / 60)
    assert list(rooms.per_kept) == pytest.approx([1.0, 0.5])
    before = rooms.held(graph, (0, 0, 1))
    assert before == [3 * 30 + 10, 3 * 30 + 5]
    excess = [own - limit for own, limit in zip(before, rooms.limits, strict=True)]
    assert excess == pytest.approx([10.0, -200.0])
    assert assign(graph, 2, rooms=rooms).stages == (0, 1, 1)


@pytest.mark.parametrize("trials", amounts(30, 150))
def test_what_is_too_small_for_all_units_fits_none(trials):
    too_small = 0
    for seed in range(trials):
        graph, num_stages = random_graph(seed)
        graph = heavy(seed, graph)
        rooms = random_rooms(seed, graph, num_stages)
        if rooms.too_small(graph):
            too_small += 1
            assert not any(fits(graph, rooms, s) for s in assignments(graph, num_stages))
    assert too_small > trials / 20


def test_a_deep_chain_that_no_cut_fits_is_refused_without_a_program(monkeypatch):
    heavy_first = [Unit("a", 1.0, weight_bytes=10.0), Unit("b", 1.0, weight_bytes=10.0)]
    graph = chain(*heavy_first, *(Unit(f"u{i}", 1.0, weight_bytes=1.0) for i in range(254)))
    # Together they fit, but the first stage has no room for the first unit.
    rooms = MemoryBudget([*range(32)], [9.0, *[100.0] * 31], 1.0, [1.0] * 32)
    assert not rooms.too_small(graph)
    monkeypatch.setattr("tfpar.planning.inter_op.stages.assign.minimize_bottleneck", pytest.fail)
    with pytest.raises(InfeasibleAssignment, match="no room for the units of each"):
        assign(graph, 32, rooms=rooms)
