"""Plans with stages, beside those without: a small GPT on machines of one V100."""

from __future__ import annotations

import pytest

from benchmarks import planners

GPT = dict(vocabulary=64, length=8, hidden=256, heads=4, num_layers=2)


@pytest.fixture(scope="module")
def rows():
    planning = planners.Planning({"model": "gpt", "sizes": GPT, "batch": 8})
    return {
        name: planning.handle({"cluster": "rhino-s1", "devices": 2, "planner": name})
        for name in planners.PLANNERS_OF_STAGES
    }


@pytest.mark.nightly
def test_plans_with_stages_are_no_slower_than_what_either_level_finds_without(rows):
    staged = rows["rhino-3-stages"]
    for level in ("rhino-2-whole", "rhino-3-whole"):
        assert staged["ms"] <= rows[level]["ms"]
        assert rows[level]["plan"].startswith("no stages")
    assert staged["gib"] <= staged["limit_gib"]


@pytest.mark.nightly
def test_stages_are_found_where_links_are_slow_beside_the_work(rows):
    staged = rows["rhino-3-stages"]
    assert staged["plan"].startswith("2 stages")
    assert staged["ms"] < 0.9 * rows["rhino-3-whole"]["ms"]
    (alone,) = (cost for name, cost in staged["rivals"].items() if name.startswith("no stages"))
    best = min(rows[level]["ms"] for level in ("rhino-2-whole", "rhino-3-whole"))
    assert alone == f"{best:.1f} ms"
