"""Devices that are worth their rent: which are compared, which one is taken, and what is said."""

from __future__ import annotations

import dataclasses
import functools
import math

import pytest

from tests.graphs import BATCH, saved
from tfpar.cluster import Cluster, Device, Level, Node
from tfpar.planning.intra_op.planners import find_planner
from tfpar.planning.pipeline_search import GIVEN, search_step
from tfpar.planning.rental import _blocks, attach_rental, compare_rentals, search_rental
from tfpar.planning.request import PlanRequest
from tfpar.planning.step_search import StepSearch
from tfpar.plans import Offload, Plan, Rental
from tfpar.spec import ArgumentError, MemoryLimitError, Mesh

FAST = Device({"float32": 1e10}, 1e9, 1e10, price_per_hour=4.0, name="fast")
SLOW = Device({"float32": 4e9}, 1e9, 4e9, price_per_hour=1.0, name="slow")


def machines(*devices: Device, of: int = 2) -> Cluster:
    """Machines with so many of these devices each."""
    inside = Level(of, 1e9, 1e-6)
    nodes = tuple(Node(device, (inside,)) for device in devices)
    return Cluster("rented", nodes, (Level(len(devices), 1e8, 1e-5),))


@functools.cache
def search() -> StepSearch:
    return StepSearch(saved("wide"), BATCH, find_planner("tap"), state_ratio=2.0)


def request(cluster: Cluster, mesh: Mesh) -> PlanRequest:
    return PlanRequest(mesh, cluster)


@pytest.mark.parametrize(
    "shape, devices, expected",
    [
        ([2, 2], [FAST, FAST], ["0", "01", "02", "0123"]),
        ([4], [FAST, FAST], ["0", "01", "0123"]),
        ([3, 2], [FAST, FAST, SLOW], ["0", "4", "01", "02", "45", "0123", "024", "012345"]),
        ([6], [FAST, FAST, SLOW], ["0", "4", "01", "45", "0123", "012345"]),
        # Of like devices, those that are rented for less are others.
        (
            [4],
            [FAST, dataclasses.replace(FAST, price_per_hour=3.0)],
            ["0", "2", "01", "23", "0123"],
        ),
    ],
    ids=["machines", "a row", "kinds", "kinds in a row", "rents"],
)
def test_blocks_are_those_that_differ(shape, devices, expected):
    mesh, cluster = Mesh.of(shape), machines(*devices)
    found = [*_blocks(mesh, cluster)]
    assert {"".join(map(str, block.ranks)) for block in found} == {*expected}
    assert len(found) == len(expected), "each once"
    assert all(block.mesh.size == len(block.ranks) for block in found)
    assert all(block.mesh.axis_names == mesh.axis_names for block in found)


def planned(cluster: Cluster, rental: Rental) -> Plan:
    """The plan for the devices of a rental, searched by itself."""
    part = cluster.part(rental.ranks)
    plan, _ = search_step(search(), request(part, Mesh.of([len(rental.ranks)])), GIVEN)
    return plan


def dollars(rental: Rental, plan: Plan) -> float:
    """Of a million samples."""
    return rental.dollars_per_hour / 3600 * plan.cost.seconds / BATCH * 1e6


@pytest.mark.slow
@pytest.mark.parametrize(
    "price, best",
    [(4.0, "1 x slow of 1 machine"), (2.0, "1 x fast of 1 machine")],
    ids=["slow ones are worth it", "fast ones are"],
)
def test_the_cheapest_devices_are_taken_and_none_that_is_left_out_is_cheaper(price, best):
    cluster = machines(dataclasses.replace(FAST, price_per_hour=price), SLOW)
    plan, problem = search_rental(search(), request(cluster, Mesh.of([4])), Mesh.of([4]), GIVEN)
    own, *others = plan.findings.rentals
    assert plan.num_ranks == len(own.ranks) and problem.cluster == cluster.part(own.ranks)
    assert own.samples == BATCH and own.seconds == plan.cost.seconds
    assert own.dollars_per_million == pytest.approx(dollars(own, plan))
    left = [rental for rental in others if math.isinf(rental.seconds)]
    assert left and all("its compute alone costs $" in rental.reason for rental in left)
    least = min(r.dollars_per_million for r in plan.findings.rentals)
    assert own.dollars_per_million <= 1.1 * least
    for rental in left:
        assert dollars(rental, planned(cluster, rental)) > 1.1 * least
    cheapest = min(plan.findings.rentals, key=lambda rental: rental.dollars_per_million)
    assert cheapest.name == best
    again = Plan.from_json(plan.to_json())
    assert again.findings.rentals == plan.findings.rentals
    assert again.cluster.ranks == own.ranks, "a plan says which devices it is for"
    again.check_ranks(Mesh.of([plan.num_ranks]), cluster)


def test_devices_on_which_the_step_does_not_fit_are_left_out():
    needed = planned(machines(FAST), Rental("", (0,), 0.0, BATCH)).cost.memory_bytes
    cluster, mesh = machines(FAST).with_memory(0.8 * needed), Mesh.of([2])
    asked = dataclasses.replace(request(cluster, mesh), recompute=False, offload=Offload())
    plan, _ = search_rental(search(), asked, mesh, GIVEN)
    own, other = plan.findings.rentals
    assert plan.num_ranks == 2 and own.name == "2 x fast of 1 machine"
    assert other.ranks == (0,) and other.reason.startswith("a rank would store ")
    with pytest.raises(MemoryLimitError, match="2 ranks share"):
        asked = dataclasses.replace(asked, cluster=cluster.with_memory(1000.0))
        search_rental(search(), asked, mesh, GIVEN)


def test_a_job_that_has_its_devices_learns_which_are_worth_it():
    cluster, mesh = machines(FAST), Mesh.of([2])
    asked = request(cluster, mesh)
    whole = search_step(search(), asked, GIVEN)
    plan, best = compare_rentals(search(), asked, mesh, GIVEN, whole)
    own, other = plan.findings.rentals
    assert plan.with_findings(rentals=()) == whole[0] and own.ranks == (0, 1)
    assert best in (own, other) and best.dollars_per_million <= 1.1 * min(
        own.dollars_per_million, other.dollars_per_million
    )


def test_the_rent_has_to_be_known():
    unknown = machines(FAST, dataclasses.replace(SLOW, price_per_hour=None))
    mesh = Mesh.of([4])
    with pytest.raises(ArgumentError, match=r"that of rank 2 \(slow\) of cluster 'rented' is not"):
        search_rental(search(), request(unknown, mesh), mesh, GIVEN)
    plan, _ = search_step(search(), request(unknown, Mesh.of([2])), GIVEN)
    (own,) = attach_rental(plan, unknown, BATCH).findings.rentals
    assert own.dollars_per_hour == 8.0, "of the ranks of the plan alone"
    assert attach_rental(plan, unknown.part([2, 3]), BATCH) == plan
    assert attach_rental(plan, unknown, None) == plan
