"""Orders of machines, what a step is estimated to take in them, and which is taken."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from tests.planning.problems import Captured
from tfpar.cluster import Cluster, Device, Level, Node
from tfpar.cost import Cost
from tfpar.pipeline import Pipeline
from tfpar.planning.candidates import BalancedShares, SolvedCandidate
from tfpar.planning.drive import search_plan
from tfpar.planning.incumbent import SearchInterrupted
from tfpar.planning.inter_op.machine_order import (
    MOST_ORDERS,
    PLANNED,
    ActorSlots,
    PlacementWorkload,
    _kind_orders,
    fastest_groups,
    fastest_orders,
)
from tfpar.planning.inter_op.placing import GivenPipeline
from tfpar.planning.objective import UNCERTAINTY
from tfpar.spec import MemoryLimitError, Mesh

FAST = Device({"float32": 4e12}, 16e9, 4e11, name="fast")
SLOW = dataclasses.replace(FAST, flops={"float32": 1e12}, name="slow")
PAIR = (Level(2, 1e11, 0.0),)


def machines(*nodes: Node, bandwidth: float = 1e9) -> Cluster:
    count = sum(node.count for node in nodes)
    return Cluster("mixed", nodes, (Level(count, bandwidth, 0.0),))


def seconds(part: Cluster) -> float:
    return 4e12 / part.device.flops["float32"]


def test_all_orders_of_kinds_but_the_given_one():
    cluster = machines(*map(Node, (FAST, SLOW, FAST, SLOW)))
    alone = ActorSlots(cluster, 1, 4).orders()
    assert len(alone) == 6 - 1 and len({*alone}) == 5
    assert {tuple(seconds(cluster.part([r])) for r in order) for order in alone} == {
        *itertools.permutations((1.0, 4.0, 1.0, 4.0))
    } - {(1.0, 4.0, 1.0, 4.0)}
    assert {*ActorSlots(cluster, 2, 2).orders()} == {(0, 2, 1, 3), (1, 3, 0, 2)}


def test_machines_of_several_ranks_stay_whole_where_stages_are_as_large():
    cluster = machines(Node(FAST, PAIR), Node(SLOW, PAIR), Node(FAST, PAIR))
    assert {*ActorSlots(cluster, 2, 3).orders()} == {(0, 1, 4, 5, 2, 3), (2, 3, 0, 1, 4, 5)}
    halves = ActorSlots(cluster, 3, 2).orders()
    assert all(list(order[:3]) == sorted(order[:3]) for order in halves)
    assert all(sorted(order) == [*range(6)] for order in halves)


def test_machines_that_are_alike_have_one_order():
    assert ActorSlots(machines(Node(FAST, PAIR, 4)), 2, 4).orders() == []
    part = machines(Node(FAST, PAIR, 2), Node(SLOW, PAIR, 2))
    assert ActorSlots(part, 2, 2).orders() == []  # the slow ones have no ranks


def test_thousands_of_machines_that_are_alike_have_one_order():
    assert list(_kind_orders([4096])) == [(0,) * 4096]
    assert list(_kind_orders([2, 1])) == [(0, 0, 1), (0, 1, 0), (1, 0, 0)]


def test_links_and_memory_tell_machines_apart():
    uplink = machines(Node(FAST), Node(FAST, uplink=1e8), Node(FAST, count=2))
    assert {*ActorSlots(uplink, 1, 4).orders()} == {(1, 0, 2, 3), (0, 2, 1, 3), (0, 2, 3, 1)}
    small = dataclasses.replace(FAST, memory_bytes=1e9)
    assert ActorSlots(machines(Node(FAST), Node(small)), 1, 2).orders() == [(1, 0)]


def test_of_many_machines_those_of_a_kind_stay_together():
    devices = [dataclasses.replace(FAST, memory_bytes=1e9 * (1 + kind)) for kind in range(4)]
    nodes = [Node(device) for _ in range(4) for device in devices]
    orders = ActorSlots(machines(*nodes), 2, 8).orders()
    assert len(orders) == 24 <= MOST_ORDERS
    for order in orders:
        kinds = [rank % 4 for rank in order]
        assert len([*itertools.groupby(kinds)]) == 4


def test_the_estimate_is_equation_4():
    """4 stages of one device, of which one is 4 times slower: all take alike."""
    cluster = machines(*map(Node, (FAST, SLOW, FAST, FAST)), bandwidth=1e9)
    places = ActorSlots(cluster, 1, 4)
    each = 1 / (1 + 1 / 4 + 1 + 1) / 8
    alone = PlacementWorkload(seconds, 1e9, 0.0, 8)
    assert alone.estimate(places, ()) == pytest.approx((7 + 4) * each)
    sending = PlacementWorkload(seconds, 1e9, 8e6, 8)  # 1 MB a microbatch and way: 1 ms
    assert sending.estimate(places, ()) == pytest.approx((7 + 4) * each + 2 * 3 * 1e-3)
    narrow = PlacementWorkload(seconds, 1e9, 8 * 5e8, 8)
    assert narrow.estimate(places, ()) == pytest.approx(7 * 0.5 + 4 * each + 2 * 3 * 0.5)


def test_a_stage_is_as_slow_as_its_slowest_machine():
    places = ActorSlots(machines(*map(Node, (FAST, SLOW, FAST, SLOW))), 2, 2)
    work = PlacementWorkload(seconds, 0.0, 0.0, 4)
    mixed, sorted_out = work.estimate(places, ()), work.estimate(places, (0, 2, 1, 3))
    assert mixed == pytest.approx(5 * (4 / 2) / 2 / 4)
    assert sorted_out == pytest.approx(5 * (1 / (1 + 1 / 4)) / 2 / 4)


def test_unlike_groups_have_to_be_estimated_faster_than_what_is_there():
    cluster = machines(Node(FAST, PAIR), Node(SLOW, PAIR), Node(SLOW, PAIR))
    work = PlacementWorkload(seconds, 0.0, 0.0, 4)
    machine_each, slow_ones_together = ((0, 1), (2, 3), (4, 5)), ((0, 1), (2, 3, 4, 5))
    found = fastest_groups(cluster, 2, work, machine_each)  # fewer stages fill sooner
    assert slow_ones_together in found and machine_each not in found
    assert fastest_groups(cluster, 3, work, slow_ones_together) == []


class Estimated(PlacementWorkload):
    """By order, not by machines."""

    def estimate(self, slots, order) -> float:
        return random.Random(str(order)).random() + (not order)


class Found:
    """An evaluator of candidates that take `seconds` of an order; exceptions are raised."""

    def __init__(self, by_order, work=Estimated) -> None:
        self.problem = Captured.saved("wide").problem([2], machines(Node(FAST), Node(SLOW)))
        self.by_order = by_order
        self.slots = ActorSlots(machines(*map(Node, (FAST, SLOW, FAST, SLOW))), 1, 4)
        self.work = work(seconds, 0.0, 0.0, 4)
        self.planned_orders = []

    def evaluate(self, proposal):
        if isinstance(proposal, BalancedShares):
            return proposal.base
        self.planned_orders.append(proposal.ranks)
        found = self.by_order(proposal.ranks)
        if isinstance(found, BaseException):
            raise found
        plan = self.problem.plan(
            mesh=Mesh.of([1]),
            variables={},
            batch_axes=(),
            planner=str(proposal.ranks),
            tfpar_version="0",
        )
        cost = None if found is None else Cost(found, (found, 0.0, 0.0), (0.0,) * 3, 0.0, 0.0, 1)
        return SolvedCandidate.of(plan.with_findings(cost=cost), self.problem)

    def machine_types(self, pipeline, ranks):
        return [None]

    def unlike_groups(self, given):
        return []

    def rank_orders(self, pipeline, given):
        return fastest_orders(self.slots, self.work, given is not None)


def best_of(found: Found):
    return search_plan(GivenPipeline(found, Pipeline(4, 4)), found).best.plan


def test_the_few_that_promise_most_are_planned_and_the_fastest_is_taken():
    found = Found(lambda order: 2.0 - sum(order[:1]) / 10 if order else 3.0)
    plan = best_of(found)
    orders = found.slots.orders()
    first = sorted(orders, key=lambda order: found.work.estimate(found.slots, order))
    assert found.planned_orders == [(), *first[:PLANNED]]
    fastest = min(first[:PLANNED], key=lambda order: found.by_order(order))
    assert plan.planner == str(fastest)


def test_the_given_order_stays_unless_another_is_clearly_faster():
    near = Found(lambda order: 1.0 if order else 1.0 + 0.9 * UNCERTAINTY)
    assert best_of(near).planner == "()"
    far = Found(lambda order: 1.0 if order else 1.0 + 1.1 * UNCERTAINTY)
    assert best_of(far).planner != "()"


def test_an_order_that_does_not_promise_more_is_not_planned():
    found = Found(lambda order: 1.0, PlacementWorkload)
    assert best_of(found).planner == "()" and found.planned_orders == [()]


def test_where_the_given_order_does_not_fit_another_may():
    large = MemoryLimitError("large", 9.0)
    found = Found(lambda order: 1.0 if order else large)
    assert best_of(found).planner != "()"
    with pytest.raises(MemoryLimitError, match="large"):
        best_of(Found(lambda order: large))
    assert best_of(Found(lambda order: large if order else 1.0)).planner == "()"


def test_a_plan_that_is_not_priced_is_taken_as_it_is():
    found = Found(lambda order: None)
    assert best_of(found).cost is None and found.planned_orders == [()]


def test_an_interrupted_search_knows_the_best_so_far():
    stopped = SearchInterrupted(lambda: None)
    with pytest.raises(SearchInterrupted) as caught:
        best_of(Found(lambda order: stopped if order else 1.0))
    assert caught.value.plan.planner == "()" and caught.value.plan.findings.cut_short
    with pytest.raises(SearchInterrupted) as caught:
        best_of(Found(lambda order: 1.0 if order else stopped))
    assert caught.value.plan is None
