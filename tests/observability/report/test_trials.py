"""What trials measured, as text."""

from __future__ import annotations

from tests.observability.report.test_rejected_candidates import CHOSEN
from tfpar.observability.report.data.build import candidates_of
from tfpar.observability.report.trials import trial_text, trials_table
from tfpar.plans import Candidate, Findings, Plan
from tfpar.spec import Mesh

TRIALS = (
    Candidate("no stages, data=2", 0.02, measured_s=0.01),
    Candidate("2 stages", 0.01, measured_s=0.0125),
    Candidate("of one's own planner", measured_s=0.03),
    Candidate("4 stages", 0.04, reason="failed: OOM"),
)


def test_what_was_measured_stands_beside_what_was_predicted():
    plan = Plan(Mesh.of([1]), (), {}, {}, (), "", findings=Findings(CHOSEN, trials=TRIALS))
    tried = [found for found in candidates_of(plan) if found.kind == "trial"]
    lines = [line for line in trials_table(tried).splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]
    assert cells == [
        ["no stages, data=2", "20.00 ms", "10.00 ms", "0.50", ""],
        ["2 stages", "10.00 ms", "12.50 ms", "1.25", "measured 2.50 ms slower"],
        ["of one's own planner", "", "30.00 ms", "", "measured 20.00 ms slower"],
        ["4 stages", "40.00 ms", "", "", "failed: OOM"],
    ]


def test_a_trial_is_told_in_a_line():
    told = "tried no stages, data=2: 10.00 ms a step (predicted 20.00 ms)"
    assert trial_text(TRIALS[0]) == told
    assert trial_text(TRIALS[2]) == "tried of one's own planner: 30.00 ms a step"
