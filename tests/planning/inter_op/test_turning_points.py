"""From which batch, number of devices and memory on another candidate is taken."""

from __future__ import annotations

import dataclasses

import pytest

from tests.planning.inter_op.stages.scripted import MESH
from tfpar.cost import Cost
from tfpar.planning.inter_op.turning_points import attach_turning_points, break_even_batch
from tfpar.plans import Candidate, Findings, Plan

NOTHING = (0.0, 0.0, 0.0)
CHOSEN = Cost(2.0, (0.5, 1.0, 0.1), NOTHING, 0.4, 0.4, 1, weight_bytes=10.0)
"""1.5 seconds of passes, and half a second that a step takes once."""

BUSY = Cost(2.4, (0.7, 1.5, 0.1), NOTHING, 0.0, 0.0, 1, weight_bytes=4.0, bubble_s=0.1)
"""2.2 seconds of passes, and 0.2 once: it wins with a smaller batch."""

LARGE = dataclasses.replace(CHOSEN, seconds=1.0, compute_s=NOTHING, weight_bytes=30.0)


def with_batch(cost: Cost, factor: float) -> float:
    """Seconds of a step whose passes do so many times the work."""
    passes = sum(cost.compute_s[:2]) + sum(cost.communication_s[:2])
    return cost.seconds + (factor - 1) * passes


def test_both_take_as_long_at_the_batch_that_is_found():
    factor = break_even_batch(BUSY, CHOSEN)
    assert factor is not None and factor < 1
    assert with_batch(BUSY, factor) == pytest.approx(with_batch(CHOSEN, factor))
    handicapped = break_even_batch(BUSY, CHOSEN, 1.1)
    assert handicapped is not None
    assert 1.1 * with_batch(BUSY, handicapped) == pytest.approx(with_batch(CHOSEN, handicapped))
    slower = dataclasses.replace(BUSY, seconds=3.0, bubble_s=0.7)
    assert break_even_batch(slower, CHOSEN) is None, "slower by what batches change and what not"


def turned(*rivals: Candidate, limit: float = 16.0) -> list[tuple[float | None, float | None]]:
    plan = Plan(MESH, (), {}, {}, (), "", findings=Findings(CHOSEN, rivals=rivals))
    found = attach_turning_points(plan, limit).findings.rivals
    return [(one.batch, one.memory_limit) for one in found]


def test_of_what_stores_less_the_fastest_is_taken_where_the_plan_has_no_room():
    ranked = (
        Candidate.priced("no stages", BUSY),
        Candidate.priced("no stages, 2 microbatches", BUSY),
    )
    (_, first), (_, second) = turned(*ranked)
    assert (first, second) == (CHOSEN.memory_bytes, None)


def test_what_is_faster_and_does_not_fit_needs_the_memory_that_it_stores():
    large = dataclasses.replace(Candidate.priced("no stages", LARGE), reason="estimated")
    assert turned(large) == [(None, LARGE.memory_bytes)]
    assert turned(Candidate("4 stages", reason="There are fewer layers")) == [(None, None)]


def test_stages_have_to_be_faster_by_what_predictions_can_tell():
    near = dataclasses.replace(CHOSEN, seconds=1.9, compute_s=(0.5, 0.7, 0.1), bubble_s=0.2)
    ((same, _),) = turned(Candidate.priced("no stages", near))
    ((staged, _),) = turned(Candidate.priced("2 stages", near))
    assert same is None, "it is faster already"
    assert staged == pytest.approx(1.5), "where a tenth is made up for"
