"""What chunks hide and cost, and when a plan has them."""

from __future__ import annotations

import dataclasses

import pytest

import tfpar as tap
from tests.planning.changes import changed
from tests.planning.problems import Captured
from tfpar.cost.sub_batch_cost import hidden_by_chunks
from tfpar.planning import find_plan
from tfpar.planning.intra_op import find_planner
from tfpar.plans import Plan


def test_one_chunk_hides_nothing():
    assert hidden_by_chunks(3.0, 2.0, 1, 1.0) == 0.0


def test_chunks_hide_all_but_their_share_of_what_is_shorter():
    assert hidden_by_chunks(4.0, 2.0, 2, 1.0) == 1.0
    assert hidden_by_chunks(2.0, 4.0, 2, 1.0) == 1.0
    assert hidden_by_chunks(4.0, 2.0, 4, 1.0) == pytest.approx(1.5)


def test_devices_that_cannot_overlap_gain_nothing():
    assert hidden_by_chunks(4.0, 2.0, 4, 0.0) == 0.0


@pytest.fixture(scope="module")
def step():
    return Captured.saved("gpt_wide")


def planned(step, **changes):
    problem = step.problem({"data": 1, "model": 8}, "rhino-m8", [tap.batch("data")])
    cluster = dataclasses.replace(problem.cluster, **changes)
    return find_plan(changed(problem, cluster=cluster), find_planner("tap"))


@pytest.mark.slow
def test_a_plan_has_chunks_where_they_hide_more_than_they_cost(step, tmp_path):
    # No axis but the model's: what is split is waited for.
    found = planned(step)
    whole = planned(step, overlap=0.0)
    assert whole.chunks == 1
    assert found.chunks in (2, 4)
    assert found.cost.seconds < whole.cost.seconds
    assert sum(found.cost.communication_s) >= sum(whole.cost.communication_s), "more starts"
    assert "chunks of it one behind the other" in found.summary()
    path = str(tmp_path / "plan.json")
    found.save(path)
    assert Plan.load(path).chunks == found.chunks


@pytest.mark.slow
def test_starts_that_take_long_forbid_chunks(step):
    problem = step.problem({"data": 1, "model": 8}, "rhino-m8", [tap.batch("data")])
    (node,) = problem.cluster.nodes
    levels = (dataclasses.replace(node.levels[0], latency_s=1e-2),)
    slow = planned(step, nodes=(dataclasses.replace(node, levels=levels),))
    assert slow.chunks == 1
