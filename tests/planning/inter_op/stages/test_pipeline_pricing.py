"""What steps in stages cost: against prices of steps in one stage, and by what has to hold."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest

from tests.cases import at_night, some_first
from tests.planning.inter_op.stages.program_memory import most_stored
from tests.planning.inter_op.stages.steps import DEVICE, Staged, machines, priced_in_stages
from tfpar.cluster import Cluster, Device, Level, Node
from tfpar.compile.local import statistics_of
from tfpar.cost import (
    Cost,
    PipelineCost,
    StageTransfers,
    TaskPartition,
    bottleneck_cost,
    evaluate,
    microbatched_cost,
    staged_cost,
)
from tfpar.ir import FORWARD, Roles, format_graph, parse_graph
from tfpar.pipeline import generate
from tfpar.planning.inter_op.stages.pipeline_pricing import price_best_schedule
from tfpar.planning.memory.recompute import Blocks
from tfpar.planning.pricing.price import price_plan
from tfpar.plans import OffloadPlan, Plan
from tfpar.readable import FieldError, convert
from tfpar.spec import ScheduleError, TfparError, UnevenMesh

MODELS = ["gpt", "t5_3_layers", "unet"]
MEMORY = {"unet": 0.04, "t5_3_layers": 0.08}
"""How far apart two estimates may be: gradients of one weight that are added up, from two uses of a
tied table, or convolutions, are counted as they come in one, as a sum from the beginning in the
other."""


# --- one stage --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "model", "microbatches"),
    some_first(
        [("gpt", 1, 2), ("gpt", 2, 4), ("t5_3_layers", 1, 2), ("unet", 1, 4)],
        [(*of, count) for of in (*((name, 1) for name in MODELS), ("gpt", 2)) for count in (2, 4)],
    ),
)
def test_one_stage_costs_what_accumulation_does(name, model, microbatches):
    staged = Staged.of(name, 1, model)
    cluster, step = machines().part(range(2)), staged.step
    whole = evaluate(step.whole, cluster, step.roles, step.problem.step.state_ratio)
    laid = staged.cut(microbatches).laid
    expected = microbatched_cost(whole, laid, step.whole.mesh, cluster, step.roles)

    schedule = generate("1f1b", 1, microbatches)
    found, _ = priced_in_stages(step, staged.stage, schedule, machines())
    assert found.seconds == pytest.approx(expected.seconds, rel=1e-3)
    # What runs once a step, such as the sum of a loss, is counted with the update.
    assert found.compute_s[:2] == pytest.approx(expected.compute_s[:2], rel=0.03)
    assert sum(found.compute_s) == pytest.approx(sum(expected.compute_s), rel=1e-3)
    waiting, expected_waiting = sum(found.communication_s), sum(expected.communication_s)
    assert waiting == pytest.approx(expected_waiting, rel=0.02)
    for field in ("weight_bytes", "state_bytes", "gradient_bytes"):
        assert getattr(found, field) == getattr(expected, field)
    assert found.memory_bytes == pytest.approx(expected.memory_bytes, rel=MEMORY.get(name, 0.02))
    # What is computed of weights alone, such as a table transposed, is no microbatch's.
    assert 0.84 < found.activation_bytes / expected.activation_bytes < 1.01
    assert found.bubble_s == pytest.approx(0, abs=1e-12)


def test_one_microbatch_is_the_whole_batch():
    staged = Staged.of("gpt", 2)
    one, two = (staged.priced(m).run(generate("gpipe", 2, m)) for m in (1, 2))
    assert one.seconds > two.seconds
    assert one.in_flight == (1, 1)
    price = staged.priced(1).stages[0]
    assert price.compute_s["F"] > price.compute_s["U"] > 0 and not price.waiting_s["F"]


# --- several stages ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "model"), some_first([("unet", 1), ("gpt", 2)], [(name, 1) for name in MODELS])
)
def test_stages_do_the_work_of_one(name, model):
    quick = machines(between=1e12)  # so that nothing is sent in slices, and gathered
    (whole,), parts = (
        Staged.of(name, stages, model).priced(cluster=quick).stages for stages in (1, 3)
    )
    for kinds in ("F", "IW", "U"):
        work, waits = (
            [sum(getattr(price, field)[kind] for kind in kinds) for price in (whole, *parts)]
            for field in ("compute_s", "waiting_s")
        )
        # A sum of tensors of several stages is made in parts, once a step, and so is what follows.
        assert work[0] == pytest.approx(sum(work[1:]), rel=0.06)
        assert waits[0] == pytest.approx(sum(waits[1:]), rel=0.05)
        assert min(work) > 0
    if model > 1:
        assert whole.waiting_s["F"] > 0
    for field in ("weight_bytes", "state_bytes"):
        assert getattr(whole, field) == sum(getattr(price, field) for price in parts)


def test_equal_stages_have_the_bubble_of_the_closed_form():
    """The second of two halves of four equal blocks, and the first with the embedding."""
    prices = Staged.of("gpt_5_layers", 2).priced(4, machines(1e15, 1e15))
    equal = dataclasses.replace(
        prices.stages[0].cost, seconds={**prices.stages[0].cost.seconds, "U": 0.0}, reduction_s=0.0
    )
    stages = tuple(dataclasses.replace(price, cost=equal) for price in prices.stages)
    alike = dataclasses.replace(prices, stages=stages)
    for microbatches in (2, 4, 8):
        for name in ("gpipe", "1f1b"):
            found = alike.run(generate(name, 2, microbatches))
            assert found.bubble == pytest.approx(1 / microbatches, rel=1e-3)


@pytest.mark.parametrize("name", ["gpt", "unet", *at_night("t5_3_layers")])
def test_1f1b_holds_no_more_for_more_microbatches_and_gpipe_does(name):
    prices = Staged.of(name, 2).priced()
    peaks = {
        (family, m): [found.num_bytes for found in prices.run(generate(family, 2, m)).peaks]
        for family in ("gpipe", "1f1b")
        for m in (4, 8, 16)
    }
    assert peaks["1f1b", 4] == peaks["1f1b", 8] == peaks["1f1b", 16]
    for actor, price in enumerate(prices.stages):
        assert peaks["gpipe", 8][actor] > peaks["1f1b", 8][actor]
        grown = peaks["gpipe", 16][actor] - peaks["gpipe", 8][actor]
        assert grown == pytest.approx(8 * price.cost.kept_bytes, rel=0.05)


@pytest.mark.parametrize(
    ("name", "microbatches"),
    some_first([("gpt", 2), ("unet", 4)], itertools.product(MODELS, (2, 4))),
)
def test_zero_bubble_is_no_slower(name, microbatches):
    staged = Staged.of(name, 2)
    taken = {
        family: staged.priced(microbatches).run(generate(family, 2, microbatches)).seconds
        for family in ("1f1b", "zb-h1")
    }
    assert taken["zb-h1"] < taken["1f1b"]


def test_virtual_stages_share_ranks():
    staged = Staged.of("gpt", 4)
    schedule = generate("interleaved", 2, 4)
    prices = staged.priced(4, actors=schedule.actors)
    assert prices.ranks == ((0, 1), (2, 3))
    timeline = prices.run(schedule)
    sent = {(t.edge.producer.stage, t.edge.consumer.stage) for t in timeline.transfers}
    assert (0, 1) in sent and (0, 2) not in sent
    _, found = priced_in_stages(staged.step, staged.stage, schedule, machines())
    first, _, third, _ = found.stages
    assert first.ranks == third.ranks == (0, 1)
    assert first.peak_bytes == third.peak_bytes >= first.fixed_bytes + third.fixed_bytes


def test_a_stage_on_slower_devices_takes_longer():
    half = Device({"float32": 5e8}, 2**30, 5e8, 2e-7)
    level = (Level(2, 4e9, 1e-7),)
    nodes = (Node(DEVICE, level), Node(half, level))
    cluster = Cluster("mixed", nodes, (Level(2, 1e9, 1e-6),))
    staged = Staged.of("gpt", 2)
    for kind in "FIW":
        fast, slow = (
            [price.compute_s[kind] for price in staged.priced(4, machine).stages]
            for machine in (machines(), cluster)
        )
        assert slow == pytest.approx([fast[0], 2 * fast[1]])


def test_recompute_keeps_what_is_received_and_runs_the_forward_pass_again():
    staged = Staged.of("gpt", 2)
    plain, again = (staged.priced(recompute=recompute).stages for recompute in (False, True))
    for before, after in zip(plain, again, strict=True):
        seconds = before.cost.seconds
        assert after.cost.seconds["B"] == pytest.approx(seconds["B"] + seconds["F"])
        assert after.cost.seconds["W"] == seconds["W"]
    assert again[0].cost.kept_bytes == 0  # it is fed what it reads
    assert 0 < again[1].cost.kept_bytes < plain[1].cost.kept_bytes / 4
    schedule = generate("1f1b", 2, 4)
    before, after = (staged.priced(recompute=r).run(schedule).peaks for r in (False, True))
    assert after[0].num_bytes < before[0].num_bytes
    assert after[1].num_bytes == pytest.approx(before[1].num_bytes, rel=0.01)  # one in flight


def test_stages_are_recomputed_one_by_one():
    staged = Staged.of("gpt", 2)
    kept, again, one = (staged.priced(recompute=r).stages for r in (False, True, (0,)))
    assert one == (again[0], kept[1]) and again[0] != kept[0] and again[1] != kept[1]


def test_the_second_stage_waits_for_gradients_alone():
    """`I` is what the stage before waits for; nothing waits for the first stage."""
    first, second = Staged.of("gpt", 2).priced().stages
    assert first.compute_s["I"] == 0 and first.compute_s["W"] > 0
    assert 0.4 < second.compute_s["W"] / second.compute_s["I"] < 1.2
    assert first.cost.kept_for_weights_bytes >= first.cost.kept_bytes


def test_tied_weights_are_held_twice():
    staged = Staged.of("dnabert", 2)
    (tie,) = staged.priced().graph.ties
    table = next(v for v in staged.step.problem.step.variables if v.name == "tokens/embeddings")
    assert tie == type(tie)(0, 1, table.num_bytes, table.num_bytes)
    second = staged.priced().stages[1]
    assert second.sum_bytes == second.weight_bytes + table.num_bytes
    fixed = 2 * second.weight_bytes + second.state_bytes + 2 * table.num_bytes
    once = table.num_bytes  # transposed for the logits
    batch = sum(t.num_bytes for t in staged.step.whole.graph.inputs) / 2
    assert fixed + once < second.cost.fixed_bytes < fixed + once + 2 * batch


def test_exact_batch_statistics_keep_all_microbatches_whatever_the_schedule():
    prices = Staged.of("resnet", 2).priced()
    found = {name: prices.run(generate(name, 2, 4)) for name in ("gpipe", "1f1b")}
    assert found["gpipe"].seconds == found["1f1b"].seconds
    assert found["1f1b"].in_flight == (4, 4)
    assert found["1f1b"].bubble > 0.7  # one stage after the other


@pytest.mark.slow
@pytest.mark.parametrize("family", ["interleaved", *at_night("zb-v")])
def test_virtual_stages_with_exact_batch_statistics(family):
    staged, schedule = Staged.of("resnet", 4), generate(family, 2, 4)
    timeline = staged.priced(4, actors=schedule.actors).run(schedule)
    assert timeline.in_flight == (4,) * 4
    assert timeline.seconds > staged.priced(4).run(generate("gpipe", 4, 4)).seconds * 0.99


def test_what_is_read_after_a_join_is_kept():
    """Even where the backward pass runs the forward pass again: only from the last join on."""
    joining, other = (Staged.of(name, 1) for name in ("resnet", "gpt"))
    kept = [
        [staged.priced(4, recompute=again).stages[0].cost.kept_bytes for again in (False, True)]
        for staged in (joining, other)
    ]
    assert kept[0][1] > 0.8 * kept[0][0] and kept[1][1] == 0


def test_a_schedule_for_other_stages():
    with pytest.raises(ScheduleError, match="4 stages, but the model is cut in 2"):
        Staged.of("gpt", 2).priced().run(generate("1f1b", 4, 4))


# --- memory of tasks --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, num_stages",
    [("gpt", 1), *((name, n) for name in ("resnet", "normalized_by_kernels") for n in (1, 2))],
)
def test_ranks_hold_what_their_programs_store(name, num_stages):
    """Joins included: of exact batch statistics, written out or in kernels."""
    staged, schedule = Staged.of(name, num_stages), generate("1f1b", num_stages, 4)
    prices = staged.priced(4)
    stored = [most_stored(program) for program in staged.programs(4, schedule)]
    for price, found, most in zip(prices.stages, prices.run(schedule).peaks, stored, strict=True):
        held = found.num_bytes - price.weight_bytes - price.state_bytes
        assert 0.87 * most < held < 1.1 * most
    if num_stages == 1:
        step = staged.step
        cluster = machines().part(range(2))
        whole = evaluate(step.whole, cluster, step.roles, step.problem.step.state_ratio)
        laid = staged.cut(4).laid
        cost = microbatched_cost(whole, laid, step.whole.mesh, cluster, step.roles)
        assert 0.87 * stored[0] < cost.live_bytes < 1.1 * stored[0]


@pytest.mark.slow
@pytest.mark.parametrize("name, shares", [("gpt", (3, 1)), ("unet", (31, 1))])
def test_memory_is_that_of_a_rank_with_its_own_share(name, shares):
    """As near to what its program stores as with equal shares."""
    staged, schedule = Staged.of(name, 2), generate("1f1b", 2, 2)
    uneven = UnevenMesh.over(staged.plan.mesh, 0, shares)

    def held_and_stored(mesh: UnevenMesh | None) -> list[tuple[float, int]]:
        prices = staged.priced(2, shares=mesh)
        # Tensors of a program have the shapes of the largest share.
        programs = staged.programs(2, schedule, shares=mesh)
        return [
            (found.num_bytes - price.weight_bytes - price.state_bytes, most_stored(program))
            for price, found, program in zip(
                prices.stages, prices.run(schedule).peaks, programs, strict=True
            )
        ]

    equal, more = held_and_stored(None), held_and_stored(uneven)
    for (held, stored), (known, most) in zip(more, equal, strict=True):
        assert stored > 1.3 * most
        assert held / stored == pytest.approx(known / most, rel=0.03)
    fewer = staged.priced(2, shares=uneven.seen_from(1)).run(schedule).peaks
    kept = staged.priced(2).run(schedule).peaks
    assert all(a.num_bytes < b.num_bytes for a, b in zip(fewer, kept, strict=True))


# --- values -----------------------------------------------------------------------------------


def test_what_it_comes_to():
    staged, schedule = Staged.of("gpt", 2), generate("1f1b", 2, 4)
    cost, found = priced_in_stages(staged.step, staged.stage, schedule, machines())
    prices = staged.priced()
    timeline = prices.run(schedule)
    assert cost == bottleneck_cost(prices, schedule, timeline)
    assert found == staged_cost(prices, schedule, timeline)
    assert cost.seconds == found.seconds == timeline.seconds
    parts = (*cost.compute_s, *cost.communication_s, cost.exposed_s, cost.bubble_s)
    assert sum(parts) == pytest.approx(cost.seconds) and cost.bubble_s > 0
    assert cost.memory_bytes == max(share.peak_bytes for share in found.stages)
    assert [share.in_flight for share in found.stages] == [2, 1]
    assert [share.ranks for share in found.stages] == [(0, 1), (2, 3)]
    for share in found.stages:
        least = share.fixed_bytes + share.in_flight * share.kept_bytes
        assert share.peak_bytes >= least and share.peak_task
    assert convert(json.loads(json.dumps(dataclasses.asdict(found))), PipelineCost) == found


def test_memory_is_told_of_the_stage_that_holds_most_of_what_it_may():
    """Not of one that has less memory, and hardly uses it."""
    staged, schedule = Staged.of("gpt", 2), generate("1f1b", 2, 4)
    _, found = priced_in_stages(staged.step, staged.stage, schedule, machines())
    first, second = (share.peak_bytes for share in found.stages)
    nodes = [
        Node(dataclasses.replace(DEVICE, memory_bytes=memory), (Level(2, 1e10, 0.0),))
        for memory in (50 * first, 1e-3 * first + second)
    ]
    for order, fullest in ((nodes, 1), ([nodes[0], nodes[0]], 0)):
        cluster = Cluster("roomy first", order, (Level(2, 1e9, 0.0),))
        cost, found = priced_in_stages(staged.step, staged.stage, schedule, cluster)
        assert found.fullest == fullest
        assert cost.memory_bytes == pytest.approx((first, second)[fullest])
    idle = dataclasses.replace(found.stages[1], peak_bytes=16.0, limit_bytes=40 * first)
    found = dataclasses.replace(found, stages=(found.stages[0], idle))
    assert idle.excess_bytes > found.stages[0].excess_bytes and found.fullest == 0


def prices(plan: Plan, staged: Staged, cluster: Cluster) -> tuple[Cost, PipelineCost]:
    """Of a plan with stages: as plans compare it, and stage by stage."""
    found = price_plan(plan, staged.problem, cluster)
    return found.cost, found.stages.cost


def test_what_stages_have_in_host_memory_is_checked_against_what_there_is():
    staged, schedule = Staged.of("wide", 2), generate("1f1b", 2, 4)
    names = tuple(n for n, v in staged.plan.variables.items() if v.trainable)
    block = Blocks.of(staged.problem.step.graph).recomputed(True)[:1]
    stages = dataclasses.replace(staged.plan.stages, schedule=schedule)
    plan = dataclasses.replace(staged.plan, stages=stages, microbatches=4)
    here = price_plan(plan, staged.problem, machines())
    assert here.cost.host_bytes == 0
    away = dataclasses.replace(plan, offloaded=OffloadPlan(names, block))
    cost, found = prices(away, staged, machines())
    assert {stage.host_limit_bytes for stage in found.stages} == {None} and found.fits
    assert cost.host_bytes == max(stage.host_bytes for stage in found.stages)
    assert cost.host_slot_bytes and cost.host_activation_bytes
    # Four devices share what a node has.
    for room, fits in ((5 * cost.host_bytes, True), (3 * cost.host_bytes, False)):
        _, found = prices(away, staged, machines().with_host_memory(room))
        assert found.fits == fits, room
        assert found.stages[0].host_limit_bytes == pytest.approx(room / machines().nodes[0].size)
        assert convert(json.loads(json.dumps(dataclasses.asdict(found))), PipelineCost) == found


@pytest.mark.slow
def test_a_plan_says_how_it_runs():
    staged = Staged.of("gpt_5_layers", 2)
    schedule = generate("zb-h1", 2, 4)
    stages = dataclasses.replace(staged.plan.stages, schedule=schedule, recompute=True)
    plan = dataclasses.replace(staged.plan, stages=stages, microbatches=4)
    found = prices(plan, staged, machines())
    expected = priced_in_stages(staged.step, staged.stage, schedule, machines(), recompute=True)
    assert found == expected
    blocks = Blocks.of(staged.problem.step.graph).recomputed(True)
    again = dataclasses.replace(plan, recompute=blocks)
    cost, _ = prices(again, staged, machines())
    assert cost.compute_s[1] > expected[0].compute_s[1]


@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_forward_pass_in_stages_costs_what_its_parts_do(microbatches):
    """Stages work one after the other, and on different microbatches at the same time."""
    staged = Staged.of("gpt", 2)
    graph = parse_graph(format_graph(staged.problem.step.graph))
    roles = Roles.of(graph)
    graph.ops = [op for op in graph.ops if roles.phase[op] == FORWARD]
    graph.effects = [op for op in graph.effects if op in graph.ops]
    inputs = frozenset(graph.inputs[:2])
    problem = staged.problem.with_step(
        graph=graph, batched=inputs, zero_cost_ops=frozenset(), state_ratio=0.0
    )
    schedule = generate("1f1b", 2, microbatches)
    stages = dataclasses.replace(staged.plan.stages, schedule=schedule, recompute=True)
    plan = dataclasses.replace(staged.plan, stages=stages, microbatches=microbatches)
    found = price_plan(plan, problem, machines())
    cost, (first, last) = found.stages.cost, found.stages.cost.stages
    forward = [ran.task for ran in cost.tasks if ran.task[1] == "F"]
    assert len(forward) == 2 * microbatches
    assert {ran.task for ran in cost.tasks} - {*forward} <= {"0U", "1U"}, "and metrics, once"
    assert all(one.backward_s == one.reduction_s == 0 for one in cost.stages)
    sent = [send.end_s - send.start_s for send in cost.sends]
    assert min(sent) > 0 and {send.task for send in cost.sends} >= {"0F0"}
    whole = first.forward_s + max(sent) + last.forward_s + last.update_s
    assert cost.seconds >= whole and found.cost.compute_s[1] == 0
    if microbatches == 1:
        assert cost.seconds == pytest.approx(whole + machines().step_s)
    slower = max(first.forward_s, last.forward_s)
    assert cost.seconds <= whole + (microbatches - 1) * (slower + max(sent)) + machines().step_s
    # Weights are stored once, and nothing is for a backward pass: neither gradients nor slots.
    weights = sum(v.num_bytes for v in graph.variables)
    assert sum(one.fixed_bytes for one in cost.stages) < 1.5 * weights
    assert found.cost.gradient_bytes == found.cost.state_bytes == 0
    assert price_best_schedule(plan, problem, machines()) == found


def test_a_staged_cost_that_is_none():
    staged, schedule = Staged.of("gpt", 2), generate("1f1b", 2, 4)
    _, found = priced_in_stages(staged.step, staged.stage, schedule, machines())
    fields = dataclasses.asdict(found)
    with pytest.raises(FieldError, match="bubble is 'much'; it must be a finite number"):
        convert({**fields, "bubble": "much"}, PipelineCost)
    with pytest.raises(FieldError, match=r"stages\[0\].peak_task is 3; it must be a string"):
        convert({**fields, "stages": [{**fields["stages"][0], "peak_task": 3}]}, PipelineCost)
    with pytest.raises(FieldError, match="bubble is missing"):
        convert({"seconds": 1.0}, PipelineCost)


def test_fewer_ranks_than_stages_have():
    with pytest.raises(TfparError, match="`ranks` name rank 16, but it has 16 devices"):
        Staged.of("gpt", 2).priced(4, machines().part(range(2)))


# --- batch statistics -------------------------------------------------------------------------


def test_statistics_of_a_microbatch_hold_nothing_up():
    staged = Staged.of("resnet", 2)
    schedule = generate("1f1b", 2, 4)

    def priced(batch_statistics):
        problem = staged.step.problem.with_batch(batch_statistics=batch_statistics)
        step = dataclasses.replace(staged.step, problem=problem)
        cut = step.cut(4)
        found = TaskPartition(cut, step.roles, staged.stage, 2, None, step.statistics(cut))
        cost, _ = priced_in_stages(step, staged.stage, schedule, machines())
        return StageTransfers(found, (0, 1)).stage_graph(), cost

    (exact, exact_cost), (own, own_cost) = map(priced, ("exact", "microbatch"))
    assert exact.joins and not own.joins
    assert own.links == exact.links
    assert own_cost.activation_bytes < exact_cost.activation_bytes / 2
    assert own_cost.seconds < exact_cost.seconds


def test_activations_that_wait_for_a_join_are_stored_for_all_microbatches():
    staged = Staged.of("resnet", 1)
    cluster, step = machines().part(range(2)), staged.step
    whole = evaluate(step.whole, cluster, step.roles, step.problem.step.state_ratio)
    laid = staged.cut(4).laid
    own = statistics_of(laid, step.roles)
    args = (whole, laid, step.whole.mesh, cluster, step.roles)
    exact, alone = microbatched_cost(*args), microbatched_cost(*args, own)
    assert alone.activation_bytes == pytest.approx(whole.activation_bytes / 4)
    assert exact.activation_bytes > 0.6 * whole.activation_bytes
    assert exact.memory_bytes > alone.memory_bytes
    # Mean and variance travel over ranks for each microbatch.
    assert alone.communication_s[0] == pytest.approx(4 * exact.communication_s[0], rel=0.05)
