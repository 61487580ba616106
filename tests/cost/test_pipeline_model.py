"""Fewer routes, over which a pipeline takes as long."""

from __future__ import annotations

import random

import pytest

from tests.planning.inter_op.three_d.tables import cluster
from tfpar.cost.pipeline_model import StageNetwork, StageProfile, StageRoute, merge_symmetric_routes
from tfpar.cost.simulator import simulate
from tfpar.pipeline import StageGraph, generate, task_graph

STAGES, MICROBATCHES, NUM_BYTES = 3, 4, 60.0


def seconds(network):
    """When each transfer of a pipeline begins and ends, and what runs when."""
    costs = [StageProfile({"F": 1.0 + stage, "B": 2.0}) for stage in range(STAGES)]
    graph = task_graph(
        generate("1f1b", STAGES, MICROBATCHES), StageGraph.chain(STAGES, NUM_BYTES, NUM_BYTES)
    )
    timeline = simulate(graph, costs, network)
    return [*timeline.events, *timeline.transfers]


def same(network):
    found = merge_symmetric_routes(network)
    for one, other in zip(seconds(network), seconds(found), strict=True):
        assert one[:2] == pytest.approx(other[:2])
        assert one[2:] == other[2:]
    return found


def between_stages(on, ranks_of_stage):
    part = 1 / len(ranks_of_stage[0])
    sent = {}
    for s in range(STAGES - 1):
        pairs = list(zip(ranks_of_stage[s], ranks_of_stage[s + 1], strict=True))
        sent[s, s + 1] = [(a, b, part) for a, b in pairs]
        sent[s + 1, s] = [(b, a, part) for a, b in pairs]
    return StageNetwork.of(on, sent)


def num_routes(network):
    return [len(routes) for routes in network.routes.values()]


def test_routes_over_the_same_links_and_machines_that_look_the_same_are_one():
    on = cluster(*[("fast", 4, 100.0, 10.0)] * 6)
    network = between_stages(on, [range(0, 8), range(8, 16), range(16, 24)])
    assert num_routes(network) == [8] * 4
    assert num_routes(same(network)) == [1] * 4


def test_machines_with_other_links_are_told_apart():
    on = cluster(*[("fast", 2, 100.0, speed) for speed in (10.0, 7.0)] * 3)
    network = between_stages(on, [range(0, 4), range(4, 8), range(8, 12)])
    assert num_routes(same(network)) == [2] * 4


def test_routes_that_share_links_with_others_are_kept():
    """Two of the first stage's ranks send to one machine, two to each other."""
    on = cluster(*[("fast", 4, 100.0, 10.0)] * 3)
    network = between_stages(on, [(0, 1, 4), (2, 5, 8), (3, 6, 9)])
    same(network)


@pytest.mark.parametrize("seed", range(30))
def test_a_pipeline_over_any_network_takes_as_long(seed):
    rng = random.Random(seed)
    links = {name: rng.choice([5.0, 10.0]) for name in "abcde"}
    known = [
        StageRoute(tuple(rng.sample(list(links), rng.randint(0, 2))), rng.choice([0.0, 0.5]), 0.25)
        for _ in range(4)
    ]
    routes = {stages: tuple(rng.choices(known, k=4)) for stages in [(0, 1), (1, 0), (1, 2), (2, 1)]}
    found = same(StageNetwork(links, routes))
    assert sum(num_routes(found)) <= 16
