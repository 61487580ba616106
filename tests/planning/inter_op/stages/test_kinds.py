"""On which machines plans for the ranks of a stage are searched, and which is taken."""

from __future__ import annotations

import dataclasses

import pytest

from tests.planning.problems import Captured
from tfpar.cluster import Cluster, Device, Level, Node, likeness
from tfpar.cost import Cost
from tfpar.pipeline import Pipeline
from tfpar.planning.candidates import BalancedShares, SolvedCandidate
from tfpar.planning.drive import search_plan
from tfpar.planning.incumbent import SearchInterrupted
from tfpar.planning.inter_op.machine_types import list_machine_types, search_machine_types
from tfpar.planning.inter_op.placing import GivenPipeline
from tfpar.spec import MemoryLimitError, Mesh

FAST = Device({"float32": 4e12}, 16e9, 4e11, name="fast")
SLOW = dataclasses.replace(FAST, flops={"float32": 1e12}, memory_bytes=8e9, name="slow")
PAIR = (Level(2, 1e11, 1e-6),)


def machines(*nodes: Node) -> Cluster:
    count = sum(node.count for node in nodes)
    return Cluster("mixed", nodes, (Level(count, 1e9, 1e-5),))


def test_sets_of_ranks_that_are_alike_are_one_kind():
    cluster = machines(Node(FAST, PAIR, 2), Node(SLOW, PAIR, 2))
    found = list_machine_types(cluster, [2] * 4, 2)
    assert {kind.ranks: count for kind, count in found.items()} == {(0, 1): 2, (4, 5): 2}
    assert {kind.device.memory_bytes for kind in found} == {2 * 16e9 + 2 * 8e9}
    assert [kind.ranks for kind in list_machine_types(cluster, [4] * 2, 4)] == [
        (0, 1, 2, 3),
        (4, 5, 6, 7),
    ]
    assert len(list_machine_types(machines(Node(FAST, PAIR, 4)), [2] * 4, 2)) == 1


def test_memory_alone_is_no_kind_of_its_own():
    small = dataclasses.replace(FAST, memory_bytes=1e9)
    (found,) = list_machine_types(machines(Node(FAST), Node(small)), [1, 1], 1)
    assert found.device.memory_bytes == 17e9


def test_what_tells_parts_of_a_cluster_apart():
    cluster = machines(Node(FAST, PAIR, 2), Node(FAST, PAIR, uplink=1e8), Node(SLOW, PAIR))
    within, other, across, uplink, mixed = (
        likeness(cluster.part(ranks)) for ranks in ((0, 1), (2, 3), (0, 2), (0, 4), (0, 6))
    )
    assert within == other
    assert len({within, across, uplink, mixed}) == 4


def test_sets_of_unlike_machines_are_searched_where_no_other_kind_has_these():
    fast, slow = Node(FAST, PAIR), Node(SLOW, PAIR)

    def searched(*nodes):
        kinds = list_machine_types(machines(*nodes), [4] * (len(nodes) // 2), 4)
        return [kind.ranks for kind in search_machine_types(kinds)]

    assert searched(fast, fast, fast, slow, slow, slow) == [(0, 1, 2, 3), (8, 9, 10, 11)]
    assert searched(fast, fast, fast, slow) == [(0, 1, 2, 3), (4, 5, 6, 7)]


class Found:
    """An evaluator of candidates that take so many seconds on each machine type; of None there is
    none, as it runs as another; a plan may have no price."""

    UNPRICED = -1.0

    def __init__(self, *seconds) -> None:
        self.problem = Captured.saved("wide").problem([2], machines(Node(FAST), Node(SLOW)))
        cluster = machines(Node(FAST, PAIR), Node(SLOW, PAIR))
        self.types = [*list_machine_types(cluster, [2, 2], 2)]
        self.seconds = dict(zip(self.types, seconds, strict=True))

    def evaluate(self, proposal):
        if isinstance(proposal, BalancedShares):
            return proposal.base
        seconds = self.seconds[proposal.machines]
        if isinstance(seconds, BaseException):
            raise seconds
        if seconds is None:
            return None
        plan = self.problem.plan(
            mesh=Mesh.of([2]), variables={}, batch_axes=(), planner="", tfpar_version="0"
        )
        cost = Cost(seconds, (seconds, 0.0, 0.0), (0.0,) * 3, 0.0, 0.0, 1)
        plan = plan.with_findings(cost=None if seconds == self.UNPRICED else cost)
        return SolvedCandidate.of(plan, self.problem.on(proposal.machines))

    def machine_types(self, pipeline, ranks):
        return self.types

    def unlike_groups(self, given):
        return []

    def rank_orders(self, pipeline, given):
        return []

    def fastest(self):
        best = search_plan(GivenPipeline(self, Pipeline(2, 2)), self).best
        return best.plan, best.problem


def test_the_fastest_is_taken_with_its_problem():
    search = Found(2.0, 1.0)
    plan, problem = search.fastest()
    assert plan.cost.seconds == 1.0 and problem.cluster == search.types[1]
    assert Found(1.0, 2.0).fastest()[0].cost.seconds == 1.0
    assert Found(Found.UNPRICED, 2.0).fastest()[0].cost is None


def test_what_runs_as_on_other_machines_is_no_candidate_of_its_own():
    search = Found(2.0, None)
    plan, problem = search.fastest()
    assert plan.cost.seconds == 2.0 and problem.cluster == search.types[0]


def test_what_does_not_fit_on_one_kind_may_on_another():
    assert Found(MemoryLimitError("large", 9.0), 1.0).fastest()[0].cost.seconds == 1.0
    with pytest.raises(MemoryLimitError, match="larger") as caught:
        Found(MemoryLimitError("large", 9.0), MemoryLimitError("not larger", 7.0)).fastest()
    assert caught.value.needed_bytes == 7.0


def test_an_interrupted_search_knows_the_plan_of_the_kind_before():
    stopped = SearchInterrupted(lambda: None)
    with pytest.raises(SearchInterrupted) as caught:
        Found(1.0, stopped).fastest()
    assert caught.value.plan.cost.seconds == 1.0 and caught.value.plan.findings.cut_short
    with pytest.raises(SearchInterrupted) as caught:
        Found(stopped, 1.0).fastest()
    assert caught.value.plan is None
