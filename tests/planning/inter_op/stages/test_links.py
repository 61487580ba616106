"""Stages where a link may be what keeps a step."""

from __future__ import annotations

import pytest

from tfpar.cluster import Cluster, Device, Level
from tfpar.planning.inter_op.stages.assign import assign
from tfpar.planning.inter_op.stages.links import StageLinks
from tfpar.planning.inter_op.stages.units import Flow, Unit, UnitGraph

DEVICE = Device({"float32": 1e9}, 1e9, 1e9)

LOGITS = UnitGraph(
    (Unit("tokens", 2.0), Unit("head", 1.0), Unit("loss", 3.0)),
    (Flow(0, (1,), 8.0), Flow(1, (2,), 8000.0)),
)
"""Stages that take alike are cut behind the head, where most is sent."""


def between(bandwidth: float, ranks: int = 2, latency_s: float = 0.0) -> Cluster:
    return Cluster.regular("pair", DEVICE, [Level(ranks, bandwidth, latency_s)])


def links(bandwidth: float, size: int = 1, microbatches: int = 4, **given: float) -> StageLinks:
    return StageLinks(between(bandwidth, 2 * size, **given), (0, 1), (size, size), microbatches)


def test_where_links_are_fast_stages_take_alike():
    found = assign(LOGITS, 2, links=links(1e6))
    assert found == assign(LOGITS, 2)
    assert found.stages == (0, 0, 1)


def test_where_a_link_keeps_the_step_stages_take_more():
    found = assign(LOGITS, 2, links=links(100.0))
    assert found.stages == (0, 1, 1) and found.seconds == (2.0, 4.0)
    assert max(found.seconds) <= found.most_seconds


def test_a_unit_longer_than_a_stage_keeps_what_reads_much_of_it():
    """The head alone takes longer than a stage should: what it sends need not leave it for that."""
    blocks = [Unit(f"block {i}", 1.0) for i in range(4)]
    flows = [Flow(i, (i + 1,), 8.0) for i in range(4)]
    graph = UnitGraph(
        (*blocks, Unit("head", 6.0), Unit("loss", 0.5)), (*flows, Flow(4, (5,), 8000.0))
    )
    *_, head, loss = assign(graph, 4).stages
    assert head != loss
    four = StageLinks(between(100.0, 4), (0, 1, 2, 3), (1,) * 4, 4)
    *_, head, loss = assign(graph, 4, links=four).stages
    assert head == loss == 3


def test_no_limit_is_loosened_in_vain():
    """Where all cuts are as wide, the one that takes alike is used."""
    wide = UnitGraph(LOGITS.units, tuple(Flow(i, (i + 1,), 8000.0) for i in (0, 1)))
    assert assign(wide, 2, links=links(100.0)).stages == (0, 0, 1)


def test_seconds_of_a_step():
    """Four microbatches: 0.75 s of work on each of two stages, 1000 bytes one way of each."""
    paces, stages = (1.0, 1.0), (0, 0, 1)
    slow, fast = links(1e3, latency_s=0.5), links(1e6)
    assert slow.is_link_bound(LOGITS, stages, paces) and not fast.is_link_bound(
        LOGITS, stages, paces
    )
    # One way 4000 bytes / 4 at 1000 bytes/s and 0.5 s to start, there and back of each.
    expected = 3 * 1.5 + 2 * 0.75 + 2 * 1.5
    assert slow.step_seconds(LOGITS, stages, paces) == pytest.approx(expected)
    assert fast.step_seconds(LOGITS, stages, paces) == pytest.approx(5 * 0.75 + 2e-3)


def test_ranks_share_what_a_stage_computes_and_sends():
    one, two = links(1e3), links(1e3, size=2)
    args = LOGITS, (0, 0, 1), (1.0, 1.0)
    assert two.step_seconds(*args) == pytest.approx(one.step_seconds(*args) / 2)


def test_stages_of_one_actor_send_each_other_nothing():
    alone = StageLinks(between(1.0), (0, 0), (1,), 4)
    assert not alone.is_link_bound(LOGITS, (0, 0, 1), (1.0, 1.0))
    assert alone.step_seconds(LOGITS, (0, 0, 1), (1.0, 1.0)) == pytest.approx(6.0)
