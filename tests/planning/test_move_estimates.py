"""Estimates of memory moves in closed form, against prices."""

from __future__ import annotations

import dataclasses
import math

import pytest

from tests.graphs import BATCH, saved
from tests.planning.tiny import Step, problem
from tfpar.cluster import Cluster, Device, Level
from tfpar.cost import PipelineCost, StageCost
from tfpar.pipeline import Pipeline
from tfpar.planning.memory.fit import MemoryFit
from tfpar.planning.memory.move_estimates import (
    activation_bytes,
    estimate_change,
    least_step_seconds,
    link_seconds_per_byte,
)
from tfpar.planning.memory.plan_transforms import apply_memory_transforms
from tfpar.planning.memory.recompute import Blocks
from tfpar.planning.memory.recompute_stages import RecomputeStages
from tfpar.planning.memory.stages import ChangeSlots, Reassign
from tfpar.planning.pricing.price import price_whole
from tfpar.planning.problem import Problem
from tfpar.planning.problems import state_problem
from tfpar.planning.request import PlanRequest
from tfpar.plans import OffloadPlan, PipelinePlan, Plan
from tfpar.spec import Mesh

NOTHING = OffloadPlan()
FLOPS, BANDWIDTH, HOST_BANDWIDTH = 1e12, 1e10, 1e9


def machines(ranks: int, **fields) -> Cluster:
    device = Device({"float32": FLOPS}, 2**40, BANDWIDTH, host_bandwidth=HOST_BANDWIDTH, **fields)
    return Cluster.regular("even", device, [Level(ranks, 1e9, 1e-6)])


def on_one_rank(name: str, **options) -> Problem:
    cluster = machines(1, launch_s=1e-6, host_latency_s=1e-5)
    request = PlanRequest(Mesh.of([1]), cluster, **options)
    return state_problem(saved(name), request, BATCH, state_ratio=2.0)


def repeats(problem: Problem) -> tuple[str, ...]:
    return tuple(name for names in Blocks.of(problem.step.graph).repeats for name in names)


@pytest.mark.parametrize("name", ["wide", "mixer", "gpt_one_layer", "recurrent"])
def test_the_least_that_a_step_takes_is_its_price_on_one_rank(name):
    """There an even share is all; loops, whose bodies are not counted, take longer."""
    step = on_one_rank(name)
    blocks = repeats(step)
    changes = [((), NOTHING), (blocks, NOTHING), ((), OffloadPlan(activations=blocks))]
    for recompute, offloaded in changes if blocks else changes[:1]:
        plan = Plan(Mesh.of([1]), (), {}, {}, (), "", recompute=recompute, offloaded=offloaded)
        cost, _ = price_whole(plan, step)
        least = least_step_seconds(apply_memory_transforms(step, recompute, offloaded))
        if name == "recurrent":
            assert 0 < least < cost.seconds
        else:
            assert least == pytest.approx(cost.seconds, rel=1e-3)


def test_what_xla_fuses_may_write_and_start_nothing():
    step = on_one_rank("mixer")
    fused = step.with_step(jit_compile=True)
    cost, _ = price_whole(Plan(Mesh.of([1]), (), {}, {}, (), ""), fused)
    assert 0 < least_step_seconds(fused) < cost.seconds
    assert least_step_seconds(fused) < least_step_seconds(step)


BATCH_SIZE, WIDTH, INNER, RANKS = 4096, 32, 512, 2


def block_pair() -> Problem:
    """Two blocks, each of which keeps what is within once it is activated. No gradient arrives at
    the last one, of which the loss is half the square: it is not recomputed."""
    step = Step(BATCH_SIZE, WIDTH)
    x = step.x
    for i in range(2):
        x = step.dense(f"block_{i}/up", x, INNER, "Relu")
        x = step.dense(f"block_{i}/down", x, WIDTH, "Relu")
    return problem(step.train(x), [RANKS]).with_cluster(machines(RANKS))


def test_recomputing_costs_the_work_of_what_is_no_longer_kept():
    step = block_pair()
    changed = apply_memory_transforms(step, repeats(step), NOTHING)
    inner = 4.0 * BATCH_SIZE * INNER  # bytes of what a block keeps within
    assert activation_bytes(step) - activation_bytes(changed) == inner
    moved = 4.0 * (BATCH_SIZE * WIDTH + WIDTH * INNER) + inner
    product = max(2.0 * BATCH_SIZE * WIDTH * INNER / FLOPS, moved / BANDWIDTH)
    relu = 2 * inner / BANDWIDTH
    found = estimate_change(step, changed)
    assert found.seconds_per_byte == pytest.approx((product + relu) / inner, rel=1e-6)
    added = (product + relu) / RANKS
    assert found.step_seconds == pytest.approx(least_step_seconds(step) + added, rel=1e-6)
    halves = step.with_batch(kept_part=0.5)  # half as much is freed, and all computed again
    twice = estimate_change(halves, changed.with_settings_of(halves)).seconds_per_byte
    assert twice == pytest.approx(2 * found.seconds_per_byte)


def test_what_is_offloaded_crosses_the_link_twice():
    step = block_pair()
    away = apply_memory_transforms(step, (), OffloadPlan(activations=repeats(step)))
    found = estimate_change(step, away).seconds_per_byte
    starts = 10e-6 * RANKS / (BATCH_SIZE * WIDTH)  # of a copy, for the bytes of the smaller ones
    assert 2 / HOST_BANDWIDTH <= found <= 2 / HOST_BANDWIDTH + starts
    assert link_seconds_per_byte(step.cluster) == 2 / HOST_BANDWIDTH
    shared = dataclasses.replace(step.cluster, one_memory=True)
    assert link_seconds_per_byte(shared) == 0.0


# --- stages -----------------------------------------------------------------------------

LIMIT = 90.0


def in_stages(
    peaks: tuple[float, ...],
    bubbles: tuple[float, ...],
    schedule: str = "1f1b",
    kept: float = 0.0,
    actors: tuple[int, ...] = (),
) -> Plan:
    """A plan of 10 s a step whose stages store and wait so; two microbatches are in flight."""
    actors = actors or tuple(range(len(peaks)))
    stages = tuple(
        StageCost((a,), 1.0 + i, 2.0, 0.0, 0.0, bubble, 0.0, 2, 0.0, kept, peak, "", LIMIT)
        for i, (a, peak, bubble) in enumerate(zip(actors, peaks, bubbles, strict=True))
    )
    order = Pipeline(max(actors) + 1, len(stages), schedule).order
    found = PipelinePlan(order, {}, cost=PipelineCost(10.0, 0.0, stages))
    return Plan(Mesh.of([1]), (), {}, {}, (), "", microbatches=len(stages), stages=found)


def excess(plan: Plan) -> float:
    assert plan.stages is not None and plan.stages.cost is not None
    return max(0.0, *(s.excess_bytes for s in plan.stages.cost.stages))


@pytest.mark.parametrize(
    "bubble, expected",
    [
        pytest.param(0.0, 0.1, id="others work all the time"),
        pytest.param(10 / 9.5 - 1, 0.05, id="another has half the time that it takes"),
        pytest.param(1.0, 0.0, id="another has time"),
    ],
)
def test_units_of_another_cut_take_their_work_along(bubble, expected):
    fit = MemoryFit(excess)
    fit.tried.append(in_stages((100.0, 50.0), (0.0, bubble)))
    move = Reassign(step=None, layout=None, slot_moves=())  # type: ignore[arg-type]
    # Of a rank that stores 100 B and works for 10 s, 10 B too much are 1 s of work.
    assert move.estimate(fit).seconds_per_byte == pytest.approx(expected)


def recomputed(plan: Plan) -> tuple[float, list[object]]:
    """What recomputing stages of a plan is estimated to cost for a byte, and the stages that are
    recomputed: of plans that store so much all the same."""

    class Priced:
        def price(self, again: Plan) -> Plan:
            assert again.stages is not None and again.stages.cost is None
            stages = dataclasses.replace(again.stages, cost=cost)
            return dataclasses.replace(again, stages=stages)

    assert plan.stages is not None
    cost, fit = plan.stages.cost, MemoryFit(excess)
    fit.tried.append(plan)
    move = RecomputeStages(Priced())
    found = [one.stages.recompute for one in move.plans(fit) if one.stages is not None]
    return move.estimate(fit).seconds_per_byte, found


def test_stages_are_recomputed_where_that_is_enough():
    # The first lacks 10 B; a forward pass takes it 1 s in each of 2 microbatches, and frees 20 B.
    assert recomputed(in_stages((100.0, 50.0), (0.0, 0.0), kept=20.0)) == (2 / 20, [(0,)])
    busy = 10 / 9 - 1  # waits 1 s for the other, which can be spent so
    assert recomputed(in_stages((100.0, 50.0), (busy, 0.0), kept=20.0))[0] == pytest.approx(1 / 20)
    assert recomputed(in_stages((100.0, 95.0), (0.0, 0.0), kept=20.0))[1] == [True]
    for other in (
        in_stages((100.0, 50.0), (0.0, 0.0), kept=9.0),  # is not enough
        in_stages((100.0, 50.0), (0.0, 0.0), "zb-h1", kept=20.0),  # would recompute each half
    ):
        assert recomputed(other) == (math.inf, [])


def test_of_several_stages_on_the_same_ranks_those_are_recomputed_that_take_least():
    virtual = in_stages((100.0,) * 4, (0.0,) * 4, "interleaved", kept=6.0, actors=(0, 1) * 2)
    assert recomputed(virtual)[1] == [True]
    few = in_stages((95.0, 50.0) * 2, (0.0,) * 4, "interleaved", kept=6.0, actors=(0, 1) * 2)
    assert recomputed(few) == (4 / 6, [(0,), (0, 2)])


def test_slots_are_changed_although_another_cut_fits():
    """What fits may be slow; so the nearest plan that does not fit is changed, not the best, unless
    its slots are so already."""

    class Priced:
        problem = None

        def price(self, plan):
            return plan

    def change(plan, problem, weights=()):
        return dataclasses.replace(plan, recompute=("block",))

    fit = MemoryFit(excess)
    fit.tried += [in_stages((peak, 50.0), (0.0, 0.0)) for peak in (120.0, 110.0, 100.0, 80.0)]
    move = ChangeSlots(Priced(), change, "offload slots", 0.0)  # type: ignore[arg-type]
    assert [*move.plans(fit)] == [change(fit.tried[2], None)]
    fit.tried[2] = change(fit.tried[2], None)
    assert [*move.plans(fit)] == [change(fit.tried[1], None)]
    fit.tried[:] = fit.tried[3:]
    assert not [*move.plans(fit)]
