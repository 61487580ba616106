"""Trials correct a cluster, and the corrected one says which plan is tried next; costs are scripted
parts of a step: work, and what goes over links within nodes and between them."""

from __future__ import annotations

import math

import pytest

from tfpar.cluster import Cluster, Correction, Device, Level, MeasuredCollective
from tfpar.planning.trial_ranking import TrialRanking

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


def taken(truth: Correction, plan: Scripted) -> float:
    return plan(truth.apply(DESCRIBED))


def try_all(plans, truth: Correction):
    """Try plans as trials do; the ranking then, and the plans in the order of their trials."""
    ranking, measured, at = TrialRanking(plans, DESCRIBED), {}, 0
    while at is not None:
        measured[at] = taken(truth, plans[at])
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
