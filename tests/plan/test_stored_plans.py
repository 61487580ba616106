"""Plan files that were written before: each loads as it was, and is written again to the byte."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tfpar.plans import Plan
from tfpar.spec import format_spec

FILES = Path(__file__).parent / "files"


@pytest.mark.parametrize("name", ["every_field", "stages"])
def test_a_stored_plan_is_written_as_it_was(name):
    path = FILES / f"{name}.json"
    assert Plan.load(path).to_json() == path.read_text(encoding="utf-8")


def test_a_plan_of_the_first_version_loads():
    """It lacks most keys, and a cost has no bytes of gradients."""
    plan = Plan.load(FILES / "oldest.json")
    assert (plan.tfpar_version, plan.planner, plan.chunks, plan.stages) == ("0.1.0", "tap", 1, None)
    assert plan.cost is not None and plan.cost.gradient_bytes == 0.0
    assert plan.cost.compute_s == (1e-4, 2e-4, 0.0) and plan.cost.memory_bytes == 350.0
    (layout,) = plan.findings.layouts
    assert (layout.seconds, layout.memory_bytes) == (2e-3, None)
    alternatives = plan.variables["block_0/fc1/kernel"].alternatives
    assert [format_spec(a.spec) for a in alternatives] == ["R,S(1)", "R,S(0)", "R"]
    assert [a.seconds for a in alternatives] == [1e-3, math.inf, 2e-3]
    assert Plan.from_json(plan.to_json()) == plan
