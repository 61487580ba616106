"""Groups of ranks on machines that are alike take as long on one as on another."""

from __future__ import annotations

import dataclasses
import random

import pytest

from tests.planning.inter_op.three_d.tables import cluster
from tfpar.cluster import Cluster, Level
from tfpar.cost import collective_seconds
from tfpar.planning.inter_op.three_d.time_terms import contention_domains
from tfpar.spec import Mesh

MIXED = cluster(*[("fast", 4, 100.0, 10.0)] * 3, *[("slow", 2, 50.0, 5.0)] * 4)


def beside(on: Cluster, ranks, actors):
    """The ranks of each actor and of those that share a machine with it, one by one."""
    size = len(ranks) // actors
    stages = [ranks[a * size : (a + 1) * size] for a in range(actors)]
    machines = [{on.machines[rank] for rank in stage} for stage in stages]
    for actor, own in enumerate(machines):
        near = [a for a in range(actors) if a == actor or len(own) > 1 and own & machines[a]]
        yield [rank for a in near for rank in stages[a]]


@pytest.mark.parametrize("actors", [2, 5, 10])
def test_parts_take_as_long_as_where_they_are(actors):
    rng = random.Random(actors)
    for _ in range(10):
        ranks = tuple(rng.sample(range(MIXED.size), MIXED.size))
        if rng.random() < 0.5:
            ranks = tuple(sorted(ranks, reverse=rng.random() < 0.5))
        each = MIXED.size // actors
        found = contention_domains(MIXED, ranks, actors)
        for part, there in zip(found, beside(MIXED, ranks, actors), strict=True):
            mesh = Mesh.of([len(there) // each, each // 2, 2])
            for axes in [(1,), (2,), (1, 2)]:
                args = "all_reduce", axes, 64.0, mesh
                assert collective_seconds(*args, part) == collective_seconds(
                    *args, MIXED.part(there)
                )


def test_actors_on_machines_that_are_alike_have_the_same_part():
    found = contention_domains(MIXED, tuple(range(MIXED.size)), 10)
    assert [part.ranks for part in found] == [(0, 1), (2, 3)] * 3 + [(12, 13)] * 4


def test_machines_at_other_distances_are_told_apart():
    pods = (Level(2, 1.0, 0.0), Level(2, 10.0, 0.0))
    on = cluster(*[("fast", 2, 100.0, 10.0)] * 4)
    deep = dataclasses.replace(on, levels=pods)
    across, within = (0, 4, 1, 5), (2, 0, 3, 1)
    for ranks in (across, within):
        (part,) = contention_domains(deep, ranks, 1)
        assert part.ranks == ranks
    (part,) = contention_domains(on, across, 1)
    assert part.ranks == (0, 2, 1, 3)
