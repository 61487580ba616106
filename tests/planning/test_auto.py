"""The planner that picks one: which it picks, that it says so, and that time is kept."""

import logging

import pytest

from tests.planning.problems import Captured, within
from tfpar.planning.folding.folded_model import FoldedModel
from tfpar.planning.intra_op import auto, gain
from tfpar.planning.intra_op.auto import AutoPlanner
from tfpar.planning.intra_op.rhino import RhinoPlanner
from tfpar.planning.intra_op.tap.planner import TapPlanner


@pytest.fixture(scope="module")
def loops():
    return Captured.saved("recurrent").problem([1, 2], "rhino-m8")


@pytest.fixture(scope="module")
def feed_forward():
    return Captured.saved("wide_1000_classes").problem([1, 2], "rhino-m8")


def pick(problem, seconds=None):
    return AutoPlanner().pick(within(seconds, problem), FoldedModel.of(problem, 2))[:2]


def test_rhino_decides_where_it_can(feed_forward):
    picked, why = pick(feed_forward)
    assert isinstance(picked, RhinoPlanner) and picked.level == 3 and "one by one" in why
    assert AutoPlanner().solve(feed_forward).planner == "rhino level 3"


def test_loops_are_for_tap(loops, caplog):
    planner = AutoPlanner()
    part = auto.part_in_regions(FoldedModel.of(loops, 2), loops.cluster)
    assert auto.MAX_REGION_SHARE < part < 1
    with caplog.at_level(logging.INFO, "tfpar"):
        plan = planner.solve(loops)
    assert plan.planner == "tap"
    assert "takes the tap planner" in caplog.text and "spent in loops" in caplog.text


def test_a_step_without_loops_spends_nothing_in_them(feed_forward):
    model = FoldedModel.of(feed_forward, 2)
    assert auto.part_in_regions(model, feed_forward.cluster) == 0.0


def test_little_time_is_for_tap(feed_forward):
    ops = len(FoldedModel.of(feed_forward, 2).prepared.graph.ops)
    needed = gain.SECONDS_PER_AXIS * ops**1.5
    little, why = pick(feed_forward, needed / 2)
    assert isinstance(little, TapPlanner)
    assert "Rhino's would take" in why
    enough, _ = pick(feed_forward, needed * 2)
    assert isinstance(enough, RhinoPlanner)


def test_large_graphs_are_for_tap_where_no_time_is_given(feed_forward, monkeypatch):
    monkeypatch.setattr(auto, "SEARCH_SECONDS", 1e-3)
    picked, why = pick(feed_forward)
    assert isinstance(picked, TapPlanner)
    assert "Rhino's would take" in why
    assert isinstance(pick(feed_forward, 60)[0], RhinoPlanner)


@pytest.mark.parametrize("seconds_an_axis", [0.0, 1e9], ids=["rhino", "tap"])
def test_the_time_that_is_given_is_that_of_the_planner_it_takes(
    feed_forward, seconds_an_axis, monkeypatch
):
    given = []
    for planner in (TapPlanner, RhinoPlanner):
        search = planner.search
        monkeypatch.setattr(
            planner,
            "search",
            lambda self, p, m, d, s=search: given.append(d.left) or s(self, p, m, d),
        )
    monkeypatch.setattr(gain, "SECONDS_PER_AXIS", seconds_an_axis)
    AutoPlanner().solve(within(50.0, feed_forward))
    assert len(given) == 1 and 0 < given[0] <= 50


def test_the_summary_says_who_searched(feed_forward):
    plan = AutoPlanner().solve(feed_forward)
    assert "Found by the rhino level 3 planner" in plan.summary()
