"""Trials correct a cluster, and the corrected one says which plan is tried next; costs are scripted
parts of a step: work, and what goes over links within nodes and between them."""

from __future__ import annotations

import math

import pytest

from tfpar.cluster import Cluster, Correction, Device, Level, MeasuredCollective, Node
from tfpar.planning.trial_ranking import Price, TrialRanking

DESCRIBED = Cluster.regular(
    "described",
    Device({"float32": 1e12}, 1e9, 1e11),
    [Level(2, 1e9, 1e-5), Level(4, 1e10, 1e-6)],
    node_levels=1,
    measured=(MeasuredCollective("all_reduce", (8,), 0, 1e-4, 1e9),),
)


class Scripted:
    """A plan whose step takes so many seconds on the described cluster, by part."""

    def __init__(self, work: float, within: float = 0.0, between: float = 0.0) -> None:
        self.parts, self.priced = (work, within, between), 0

    def __call__(self, cluster: Cluster) -> float:
        self.priced += 1
        paces = (
            1e12 / cluster.device.flops["float32"],
            1e10 / cluster.nodes[0].levels[0].bandwidth,
            1e9 / cluster.levels[0].bandwidth,
        )
        return sum(part * pace for part, pace in zip(self.parts, paces, strict=True))


UNKNOWN = lambda cluster: math.inf  # noqa: E731 - a plan without a prediction


def taken(truth: Correction, plan: Price, cluster: Cluster = DESCRIBED) -> float:
    return plan(truth.apply(cluster))


def try_all(plans, truth: Correction, cluster: Cluster = DESCRIBED, most: int = 100):
    """Try plans as trials do; the ranking then, and the plans in the order of their trials."""
    ranking, measured, at = TrialRanking(plans, cluster), {}, 0
    while at is not None and len(measured) < most:
        measured[at] = taken(truth, plans[at], cluster)
        ranking.learn(measured)
        left = [i for i in range(len(plans)) if i not in measured]
        at = ranking.choose(left, min(measured.values()))
    return ranking, [*measured]


BY_WORK = Scripted(1.0, 0.0, 0.15)
BY_NODE = Scripted(0.35, 0.7, 0.15)
BETWEEN = Scripted(0.2, 0.1, 1.0)
BEST = Scripted(0.5, 0.75, 0.05)  # where devices are slow and links between nodes are
PLANS = [BY_WORK, BY_NODE, BETWEEN, BEST]


@pytest.mark.parametrize(
    ("truth", "best"),
    [
        (Correction(work=3.0), BY_NODE),
        (Correction(within=3.0), BY_WORK),
        (Correction(work=3.0, between=3.0), BEST),
        (Correction(work=1 / 3), BY_WORK),
        (Correction(3.0, 3.0, 3.0), BY_WORK),
    ],
)
def test_figures_that_are_three_times_off_are_found(truth, best):
    plans = [*PLANS[:3], Scripted(0.9, 0.5, 0.3), best]
    ranking, tried = try_all(plans, truth)
    times = [taken(truth, plan) for plan in plans]
    assert min(times[i] for i in tried) == min(times)
    for name in ("work", "within", "between"):
        assert getattr(ranking.correction, name) == pytest.approx(getattr(truth, name), rel=0.2)
    for i, seconds in enumerate(times):
        assert ranking.seconds(i) == pytest.approx(seconds, rel=0.1)


def test_the_next_trial_is_the_best_plan_though_predictions_had_it_last():
    """By the description the order is 0, 1, 2; links between nodes are as fast as those within."""
    slow = Scripted(0.2, 0.1, 0.7), Scripted(0.3, 0.1, 0.65), Scripted(0.35, 0.75, 0.0)
    ranking = TrialRanking(slow, DESCRIBED)
    assert ranking.choose([0, 1, 2], math.inf) == 0
    _, tried = try_all(slow, Correction(between=3.0))
    assert tried[:2] == [0, 2]


def test_none_is_tried_that_cannot_win():
    """Of plans that use the same parts alike, those that put the prediction to the test tell
    all: one more than there are factors."""
    alike = [Scripted(f, f / 2, f / 4) for f in (1.0, 1.1, 1.5, 2.0, 1.8, 2.2)]
    _, tried = try_all(alike, Correction(2.0, 2.0, 2.0))
    assert tried == [0, 1, 2, 4]
    other = Scripted(0.0, 5.0, 0.0)  # of which they tell little
    _, tried = try_all([*alike, other], Correction(2.0, 2.0, 2.0))
    assert tried == [0, 1, 2, 4, 6]


def test_what_failed_or_is_not_predicted_corrects_nothing():
    ranking = TrialRanking([BY_WORK, UNKNOWN, BETWEEN], DESCRIBED)
    ranking.learn({})
    assert ranking.correction is None
    ranking.learn({1: 0.5})
    assert ranking.correction is None
    assert ranking.choose([0, 1, 2], math.inf) == 0
    assert ranking.choose([1], 0.5) == 1  # which nothing speaks against


def test_a_prediction_that_explains_no_trial_rules_out_less():
    """Of equal plans one takes twice as long as the other: chance, or what no factor is of."""
    ranking = TrialRanking([*[Scripted(1.0)] * 4, Scripted(1.5)], DESCRIBED)
    ranking.learn({0: 1.0, 1: 1.0, 2: 1.0})
    assert ranking.choose([4], 1.0) == 4  # factors would explain anything
    ranking.learn({0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0})
    assert ranking.choose([4], 1.0) is None
    ranking.learn({0: 1.0, 1: 2.0, 2: 1.0, 3: 2.0})
    assert ranking.choose([4], 1.0) == 4


def test_a_factor_without_evidence_stays_as_described():
    ranking = TrialRanking([Scripted(1.0)], DESCRIBED)
    ranking.learn({0: 3.0})
    assert ranking.correction.work == pytest.approx(3.0, rel=0.02)
    assert (ranking.correction.within, ranking.correction.between) == (1.0, 1.0)
    one = Cluster.regular("one", DESCRIBED.device, [Level(1, 1e9, 0.0)])
    ranking = TrialRanking([lambda cluster: 1e12 / cluster.device.flops["float32"]], one)
    ranking.learn({0: 1e6})  # far off, it is followed
    assert ranking.correction.work == pytest.approx(1e6, rel=0.2)


def test_plans_are_priced_few_times():
    plans = [Scripted(*plan.parts) for plan in PLANS]
    try_all(plans, Correction(3.0, 1.0, 3.0))
    assert sum(plan.priced for plan in plans) < 200


# --- unlike machines ------------------------------------------------------------------------------


FAST = Device({"float32": 1.1e12}, 1e9, 1e11, name="fast")
SLOW = Device({"float32": 1e12}, 1e9, 1e11, name="slow")

UNLIKE = Cluster(
    "unlike",
    (Node(FAST, (Level(2, 1e10, 1e-6),), 2), Node(SLOW, (Level(2, 1e10, 1e-6),), 2)),
    (Level(2, 1e8, 1e-5, name="spine"), Level(2, 1e9, 1e-5, name="rack")),
)


class Shared:
    """A step whose devices of both types have so many seconds of work at the same time, and that
    waits for links besides.

    Args:
        fast, slow: seconds of a device of each type.
        links: what goes over those between nodes, by level.
    """

    def __init__(self, fast: float, slow: float, *links: float) -> None:
        self.work, self.links = (fast, slow), links or (0.0, 0.0)

    def __call__(self, cluster: Cluster) -> float:
        described = zip((FAST, SLOW), (node.device for node in cluster.nodes), strict=True)
        paces = [one.flops["float32"] / now.flops["float32"] for one, now in described]
        levels = zip(UNLIKE.levels, cluster.levels, strict=True)
        sent = sum(
            s * one.bandwidth / now.bandwidth
            for s, (one, now) in zip(self.links, levels, strict=True)
        )
        return max(work * pace for work, pace in zip(self.work, paces, strict=True)) + sent


SHARES = [Shared(1.0, 1.1), Shared(1.3, 0.8), Shared(1.6, 0.5), Shared(1.9, 0.2), Shared(0.9, 1.4)]
"""Ever less is for the slow devices; the last has more for them."""


@pytest.mark.parametrize(("slower", "best"), [({"slow": 2.0}, 1), ({"fast": 2.0}, 4)])
def test_the_type_of_devices_that_is_slower_than_described_is_found(slower, best):
    truth = Correction(parts={"fast": 1.0, "slow": 1.0, **slower})
    times = [taken(truth, plan, UNLIKE) for plan in SHARES]
    assert times.index(min(times)) == best
    ranking, tried = try_all(SHARES, truth, UNLIKE, most=3)
    assert best in tried
    found = ranking.correction.parts
    (name,) = slower
    assert found[name] == pytest.approx(slower[name], rel=0.2)
    assert max(found, key=found.get) == name
    assert ranking.seconds(best) == pytest.approx(min(times), rel=0.1)


def test_levels_of_links_are_told_apart_as_far_as_trials_tell():
    plans = [Shared(0.1, 0.1, spine, rack) for spine, rack in ((1, 0.1), (0.1, 1.2), (0.5, 0.9))]
    ranking, _ = try_all(plans, Correction(parts={"spine": 3.0}), UNLIKE)
    parts = ranking.correction.parts
    assert parts["spine"] == pytest.approx(3.0, rel=0.2)
    assert parts["rack"] == pytest.approx(1.0, rel=0.2)
    # Of one plan nothing tells levels apart that it uses alike; what it does not use, stays near.
    ranking = TrialRanking([Shared(0.1, 0.1, 1.0, 1.0)], UNLIKE)
    ranking.learn({0: 4.1})
    parts = ranking.correction.parts
    assert parts["spine"] == pytest.approx(parts["rack"]) == pytest.approx(2.0, rel=0.1)
    assert ranking.correction.within == 1.0
