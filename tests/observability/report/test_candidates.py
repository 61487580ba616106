"""Why other pipelines lost, and what was tried, as text."""

from __future__ import annotations

import dataclasses

import pytest

from tests.clusters import device
from tfpar.cluster import Cluster, Correction
from tfpar.cost import Cost
from tfpar.observability.report.candidates import (
    correction_text,
    explain_rejection,
    trial_text,
    trials_table,
    trials_text,
)
from tfpar.observability.report.data.build import candidates_of
from tfpar.observability.report.data.schema import SecondsByCause
from tfpar.planning.inter_op import break_even_batch
from tfpar.plans import Candidate, Findings, Plan
from tfpar.spec import Mesh

NOTHING = (0.0, 0.0, 0.0)
CHOSEN = Cost(1.0, (0.3, 0.6, 0.1), NOTHING, 0.0, 0.0, 1, weight_bytes=5.0)


@pytest.fixture
def plan() -> Plan:
    machine = Cluster.regular("small", device(1e9, 1e9, 10.0, 1e9, 0.0), [], 0)
    return Plan(Mesh.of([1]), (), {}, {}, (), "", cluster=machine, findings=Findings(CHOSEN))


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (
            {"seconds": 1.5, "exposed_s": 1.0},
            "500.00 ms slower: gradients would have to take 50 % less",
        ),
        (
            {"seconds": 3.0, "communication_s": (1.9, 0.6, 0.0), "hidden_s": 0.1},
            "2.00 s slower: collectives would have to take 83.4 % less",
        ),
        (
            {"seconds": 1.003, "transfer_s": 0.8},
            "3.00 ms slower: compute would have to take 0.3 % less",
        ),
        ({"seconds": 2.5, "bubble_s": 1.4}, "1.50 s slower: no part of it alone makes up for that"),
        ({"seconds": 0.95}, "nearer than predictions can tell, and has more stages"),
        (
            {"seconds": 0.5, "weight_bytes": 20.0},
            "does not fit: a rank would store 20 B",
        ),
    ],
)
def test_what_would_have_to_change_for_a_rival_to_win(plan, changed, expected):
    assert (
        explain_rejection(Candidate.priced("other", dataclasses.replace(CHOSEN, **changed)), plan)
        == expected
    )


@pytest.mark.parametrize(
    ("seconds", "links", "expected"),
    [
        (1.5, 3.4201, "500.00 ms slower; taken if links were 3.5 times faster"),
        (1.5, 1 / 41, "500.00 ms slower; taken if links were 41 times slower"),
        (0.95, 1.09, "nearer than predictions can tell, and has more stages; taken if links were "),
    ],
)
def test_what_links_would_have_to_be_is_rounded_away_from_what_they_are(
    plan, seconds, links, expected
):
    rival = Candidate.priced("other", dataclasses.replace(CHOSEN, seconds=seconds))
    rival = dataclasses.replace(rival, links=links)
    assert explain_rejection(rival, plan).startswith(expected)
    plan = plan.with_findings(rivals=(rival,))
    assert Plan.from_json(plan.to_json()).findings.rivals == plan.findings.rivals


def test_what_was_not_priced_says_why(plan):
    rival = Candidate("4 stages", reason="There are fewer layers")
    assert explain_rejection(rival, plan) == "There are fewer layers"
    plan = plan.with_findings(rivals=(rival, Candidate.priced("2 stages", CHOSEN)))
    assert Plan.from_json(plan.to_json()) == plan
    text = plan.summary(full=True)
    assert "Pipelines that were compared" in text and "There are fewer layers" in text


# --- trials ---------------------------------------------------------------------------------

TRIALS = (
    Candidate("no stages, data=2", 0.02, measured_s=0.01, corrected_s=0.008),
    Candidate("2 stages", 0.01, measured_s=0.0125, corrected_s=0.0125),
    Candidate("of one's own planner", measured_s=0.03),
    Candidate("4 stages", 0.04, reason="failed: OOM"),
)


def test_what_was_measured_stands_beside_what_was_predicted():
    plan = Plan(Mesh.of([1]), (), {}, {}, (), "", findings=Findings(CHOSEN, trials=TRIALS))
    tried = [found for found in candidates_of(plan) if found.kind == "trial"]
    lines = [line for line in trials_table(tried).splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]
    assert cells == [
        ["no stages, data=2", "20.00 ms", "8.00 ms", "10.00 ms", "0.50", ""],
        ["2 stages", "10.00 ms", "12.50 ms", "12.50 ms", "1.25", "measured 2.50 ms slower"],
        ["of one's own planner", "", "", "30.00 ms", "", "measured 20.00 ms slower"],
        ["4 stages", "40.00 ms", "", "", "", "failed: OOM"],
    ]


def test_a_trial_is_told_in_a_line():
    told = "tried no stages, data=2: 10.00 ms a step (predicted 20.00 ms)"
    assert trial_text(TRIALS[0]) == told
    assert trial_text(TRIALS[2]) == "tried of one's own planner: 30.00 ms a step"


def test_what_was_not_tried_is_told_by_the_corrected_prediction():
    """It is predicted to be faster than the plan that was taken, by the description."""
    rival = Candidate.priced("4 stages", dataclasses.replace(CHOSEN, seconds=0.001))
    plan = Plan(Mesh.of([1]), (), {}, {}, (), "", findings=Findings(CHOSEN, trials=TRIALS))
    for corrected_s, why in (
        (0.0125, "not tried: corrected by trials, 2.50 ms slower"),
        (0.0075, "not tried: trials were over; corrected, 2.50 ms faster"),
    ):
        assert explain_rejection(dataclasses.replace(rival, corrected_s=corrected_s), plan) == why


def test_a_correction_names_what_the_cluster_has():
    told = "tried 2 of 5 plans: work takes 3 times as long as the cluster says"
    assert trials_text(2, 5, Correction(work=3.0)) == told
    told = "work takes 0.33 times, links between nodes 12 times as long as the cluster says"
    assert correction_text(Correction(1 / 3, 1.0, 12.3)) == told
    told = "work takes 1.5 times, V100 1 times, T4 2.2 times as long as the cluster says"
    assert correction_text(Correction(1.5, parts={"V100": 1.0, "T4": 2.2})) == told


def test_seconds_by_cause_add_up_and_turn_where_the_search_says(plan):
    """A batch from which on another candidate wins makes both take as long."""
    rival = dataclasses.replace(
        CHOSEN, seconds=1.4, compute_s=(0.2, 0.4, 0.1), communication_s=(0.1, 0.1, 0.2)
    )
    findings = Findings(CHOSEN, rivals=(Candidate.priced("other", rival),))
    found = [c.causes for c in candidates_of(dataclasses.replace(plan, findings=findings))]
    own, other = found
    assert own is not None and other is not None
    for causes, cost in ((own, CHOSEN), (other, rival)):
        assert sum(dataclasses.astuple(causes)) == pytest.approx(cost.seconds)
    batch = break_even_batch(rival, CHOSEN)
    assert batch is not None
    assert _seconds(own, batch) == pytest.approx(_seconds(other, batch))


def _seconds(causes: SecondsByCause, batch: float) -> float:
    once = causes.once_compute_s + causes.once_links_s + causes.start_s
    return batch * (causes.compute_s + causes.links_s) + once
