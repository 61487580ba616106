"""Alpa's dynamic program, against all ways to put layers and devices into stages."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import pytest

from benchmarks.alpa_simulation import simulate_alpa
from tests.planning.inter_op.three_d.tables import cluster, equal_layers, kind
from tfpar.planning.inter_op.three_d.alpa import AlpaPlan, AlpaStage, SubmeshCosts, alpa
from tfpar.planning.inter_op.three_d.cost_table import LayerCostTable
from tfpar.planning.inter_op.three_d.problem import StrategyProblem
from tfpar.spec import PlanError


def some(seed):
    rng = random.Random(seed)
    kinds = {
        f"kind {number}": kind(
            {"a": 1.0},
            seconds=rng.choice([0.5, 1.0, 3.0]),
            fixed_bytes=rng.choice([50.0, 100.0]),
            gradient_bytes=rng.choice([5.0, 50.0]),
            kept_bytes=rng.choice([1.0, 10.0]),
            reduced_bytes=rng.choice([0.0, 5.0]),
        )
        for number in range(2)
    }
    layers = tuple(rng.choice(list(kinds)) for _ in range(rng.randint(2, 4)))
    nodes = [("a", rng.choice([1, 2]), 50.0, rng.choice([5.0, 20.0]))] * 2
    memory_bytes = rng.choice([1e12, 260.0])
    return StrategyProblem(
        LayerCostTable(kinds, layers), cluster(*nodes, memory_bytes=memory_bytes), 4
    )


def brute_force(model):
    """The least of T over sizes of microbatches, runs of layers and submeshes."""
    best, layers = math.inf, len(model.table)
    for microbatch in (1, 2, 4):
        stages = SubmeshCosts(model, microbatch)
        for count in range(1, layers + 1):
            for cuts in itertools.combinations(range(1, layers), count - 1):
                ends = [0, *cuts, layers]
                for sizes in itertools.product(stages.sizes, repeat=count):
                    if sum(sizes) == model.cluster.size:
                        each = [
                            stages.best(range(ends[s], ends[s + 1]), size, count - s)[0]
                            for s, size in enumerate(sizes)
                        ]
                        best = min(best, sum(each) + (stages.count - 1) * max(each))
    return best


def test_the_dynamic_program_finds_the_best_of_all():
    several = 0
    for seed in range(30):
        model = some(seed)
        best = brute_force(model)
        if math.isinf(best):
            with pytest.raises(PlanError, match="No strategy fits into the memory"):
                alpa(model)
            continue
        found = alpa(model)
        assert found.seconds == pytest.approx(best)
        assert sum(stage.size for stage in found.stages) == model.cluster.size
        assert [layer for stage in found.stages for layer in stage.layers] == [
            *range(len(model.table))
        ]
        several += len(found.stages) > 1
    assert several >= 5


def test_stages_have_as_many_devices_as_their_layers_need():
    """Two layers of which one takes three times as long: 1 + 2 machines, nothing to send."""
    kinds = {name: kind({"a": 1.0}, seconds=s) for name, s in [("short", 1.0), ("long", 3.0)]}
    kinds = {
        name: dataclasses.replace(found, gradient_bytes=1e4, reduced_bytes=0.0)
        for name, found in kinds.items()
    }
    kinds["long"] = dataclasses.replace(kinds["long"], gradient_bytes=0.0)
    on = cluster(*[("a", 1, 1.0, 1.0)] * 3)
    model = StrategyProblem(LayerCostTable(kinds, ("short", "long")), on, 8)
    found = alpa(model)
    assert [(list(s.layers), s.size) for s in found.stages] == [([0], 1), ([1], 2)]
    assert found.seconds == pytest.approx(brute_of_two(found.microbatch))


def brute_of_two(microbatch):
    """Of a stage of 3 seconds a sample, and one of 9 on two devices."""
    own, other = 3 * microbatch, 9 * microbatch / 2
    return own + other + (8 // microbatch - 1) * max(own, other)


def test_a_plan_is_simulated_on_the_machines_that_there_are():
    """One stage on a fast device, one on two slow ones; 5 bytes a sample there and back."""
    on = cluster(("fast", 1, 1.0, 10.0), *[("slow", 1, 1.0, 10.0)] * 2)
    table = equal_layers(3, {"fast": 2.0, "slow": 1.0}, sent_bytes=5.0, gradient_bytes=20.0)
    plan = AlpaPlan((AlpaStage(range(1), 1, 1), AlpaStage(range(1, 3), 2, 1)), 4, 0.0)
    found = simulate_alpa(StrategyProblem(table, on, 4), plan)
    # 4 samples at speed 2, then 2 layers of 2 samples on each; what leaves the first shares a link.
    sums = 2 * 1 / 2 * 40 / 10
    first_backward = 2 * 4 / 2
    busy = 4 / 2 + 4 * 5 / 10 + 2 * 2 * 3 + max(sums, 4 * 5 / 10 + first_backward)
    assert found.seconds == pytest.approx(busy)


def test_unlike_devices_are_refused():
    on = cluster(("a", 1, 1.0, 1.0), ("b", 1, 1.0, 1.0))
    with pytest.raises(PlanError, match="takes all devices to be alike"):
        alpa(StrategyProblem(equal_layers(2, {"a": 1.0, "b": 1.0}), on, 4))
