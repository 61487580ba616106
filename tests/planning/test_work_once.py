"""What a search of pipelines does once, however many plans, machines and microbatches it tries."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter

import pytest

from tests.graphs import BATCH, saved
from tfpar.cluster import Cluster, Device, Level, Node
from tfpar.planning.inter_op import stage_planner
from tfpar.planning.inter_op.stages import pipeline_pricing
from tfpar.planning.intra_op.planners import find_planner
from tfpar.planning.pipeline_search import ALL, search_step
from tfpar.planning.request import PlanRequest
from tfpar.planning.step_search import StepSearch
from tfpar.plans import Plan
from tfpar.spec import Mesh

FAST = Device({"float32": 4e9}, 2**30, 4e9, 1e-7, name="fast")
SLOW = dataclasses.replace(FAST, flops={"float32": 1e9}, memory_bandwidth=1e9, name="slow")
PAIR = (Level(2, 4e9, 1e-7),)
MIXED = Cluster("mixed", (Node(FAST, PAIR), Node(SLOW, PAIR)), (Level(2, 1e8, 1e-6),))


@pytest.fixture
def counts(monkeypatch) -> Counter[str]:
    found: Counter[str] = Counter()

    def count(module, name: str) -> None:
        do = getattr(module, name)

        @functools.wraps(do)
        def counted(*given, **options):
            found[name] += 1
            return do(*given, **options)

        monkeypatch.setattr(module, name, counted)

    count(stage_planner, "assign_step")
    count(stage_planner, "planning_graph")
    count(pipeline_pricing, "cut_in_stages")
    return found


def searched(ranks: int = 4) -> Plan:
    search = StepSearch(saved("wide"), BATCH, find_planner("tap"), state_ratio=2.0)
    cluster = MIXED.part([0, 2]) if ranks == 2 else MIXED
    plan, _ = search_step(
        search,
        PlanRequest(Mesh.of([ranks]), cluster),
        ALL,
    )
    return plan


@pytest.mark.slow
def test_a_step_is_assigned_and_cut_once_for_each_number_of_stages(counts):
    plan = searched()
    stages = {p.stages.num_stages for p in found_plans(plan) if p.stages is not None}
    assert stages == {2, 4}
    assert counts["planning_graph"] == 1
    # 2 and 4 sets of ranks, of a stage each, with slow machines first and last; and on 2 of them 4
    # and 8 stages, on 4 of them 8 and 16, which take no other paces.
    assert counts["assign_step"] <= 2 * 2 + 4


def test_what_is_kept_of_steps_that_were_cut_changes_no_plan(counts, monkeypatch):
    plan = searched(2)
    tried = counts["cut_in_stages"]
    monkeypatch.setattr(pipeline_pricing, "MOST_CUT", 0)
    assert dataclasses.replace(searched(2), partitioned=None) == dataclasses.replace(
        plan, partitioned=None
    )
    assert 0 < tried < counts["cut_in_stages"] - tried


def found_plans(plan: Plan) -> list[Plan]:
    return [plan, *(rival.plan for rival in plan.findings.rivals if rival.plan is not None)]
