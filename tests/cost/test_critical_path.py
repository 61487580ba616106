"""The longest chain of tasks, against what is simulated."""

from __future__ import annotations

import random

import pytest

from tfpar.cost.critical_path import Shape, least_seconds
from tfpar.cost.pipeline_model import StageNetwork, StageProfile, StageRoute
from tfpar.cost.simulator import simulate
from tfpar.pipeline import StageGraph, StageLink, generate, task_graph

SHAPES = [Shape(1, 3), Shape(2, 1), Shape(3, 2), Shape(4, 9), Shape(2, 4, 2), Shape(3, 6, 4)]


def some(rng, shape, shared):
    """Stages and transfers that take whole seconds, on links of their own or all on two."""
    stages = shape.actors * shape.virtual
    costs = [
        StageProfile(
            {"F": rng.randint(0, 4), "B": rng.randint(0, 8)}, reduction_s=rng.choice([0, 3, 20])
        )
        for _ in range(stages)
    ]
    links = [StageLink(s, s + 1, rng.randint(0, 6), rng.randint(0, 6)) for s in range(stages - 1)]
    routes = {}
    for link in links:
        for ends in ((link.source, link.target), (link.target, link.source)):
            names = [rng.choice("ab") if shared else (*ends, part) for part in range(2)]
            routes[ends] = tuple(StageRoute((name,), rng.choice([0, 1]), 0.5) for name in names)
    names = {name for found in routes.values() for route in found for name in route.links}
    return costs, links, StageNetwork(dict.fromkeys(names, 2.0), routes)


def simulated(shape, costs, links, network):
    stages = StageGraph(len(costs), tuple(links))
    schedule = generate(shape.schedule, shape.actors, shape.microbatches, shape.virtual)
    return simulate(task_graph(schedule, stages), costs, network).seconds


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_what_is_simulated_where_no_transfers_meet(shape):
    rng = random.Random(0)
    for _ in range(20):
        costs, links, _ = some(rng, shape, shared=False)
        assert least_seconds(shape, costs) == simulated(shape, costs, links, None)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("shared", [False, True])
def test_nothing_is_simulated_as_faster(shape, shared):
    rng = random.Random(1)
    for _ in range(20):
        given = some(rng, shape, shared)
        assert least_seconds(shape, *given) <= simulated(shape, *given) * (1 + 1e-9)


def test_transfers_one_after_the_other_take_what_each_does():
    """One microbatch: 4 bytes there and 2 back at 2 bytes/s, half of them on each of two links."""
    costs = [StageProfile({"F": 1, "B": 2}), StageProfile({"F": 3, "B": 4}, reduction_s=7)]
    ends = [(0, 1), (1, 0)]
    routes = {pair: tuple(StageRoute(((*pair, i),), 5, 0.5) for i in range(2)) for pair in ends}
    network = StageNetwork({(*pair, i): 2.0 for pair in ends for i in range(2)}, routes)
    links = [StageLink(0, 1, 4.0, 2.0)]
    first_chain = 1 + (5 + 1) + 3 + 4 + (5 + 0.5) + 2
    assert least_seconds(Shape(2, 1), costs, links, network) == pytest.approx(first_chain)
    slow_sum = [costs[0], StageProfile({"F": 3, "B": 4}, reduction_s=90)]
    assert least_seconds(Shape(2, 1), slow_sum, links, network) == 1 + 6 + 3 + 4 + 90


def test_a_link_carries_all_that_crosses_it():
    """8 microbatches of 10 s there and 10 s back: between two stages, more than these compute."""
    costs = [StageProfile({"F": 1, "B": 2}), StageProfile({"F": 1, "B": 2})]
    routes = {(0, 1): (StageRoute(("bus",)),), (1, 0): (StageRoute(("bus",)),)}
    given = costs, [StageLink(0, 1, 10.0, 10.0)], StageNetwork({"bus": 1.0}, routes)
    assert least_seconds(Shape(2, 8), *given) == 1 + 8 * 20 + 2
    assert simulated(Shape(2, 8), *given) >= 1 + 8 * 20 + 2
