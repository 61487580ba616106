"""What stages are priced to send each other is what their programs send."""

from __future__ import annotations

import itertools
import math

import pytest

from tests.cases import at_night, some_first
from tests.planning.inter_op.stages.program_memory import most_stored
from tests.planning.inter_op.stages.steps import DEVICE, Staged, machines, priced_in_stages
from tfpar.cluster import Cluster, Level
from tfpar.compile.local import TASK
from tfpar.cost import (
    ScatterGatherCost,
    StageTransfers,
    collective_seconds,
    stage_prices,
    staged_cost,
)
from tfpar.ir import itemsize
from tfpar.pipeline import generate
from tfpar.spec import UnevenMesh

FAMILIES = ("gpipe", "1f1b", "zb-h1", "interleaved")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "model", "family"),
    some_first(
        [("gpt", 1, "gpipe"), ("gpt", 2, "1f1b"), ("unet", 1, "zb-h1"), ("gpt", 1, "interleaved")],
        [
            (*of, family)
            for of in (("gpt", 1), ("gpt", 2), ("unet", 1), ("t5_3_layers", 1))
            for family in FAMILIES
        ],
    ),
)
def test_what_stages_send_is_what_their_programs_send(name, model, family):
    num_stages, microbatches = 2 + 2 * (family == "interleaved"), 4
    staged = Staged.of(name, num_stages, model)
    schedule = generate(family, 2, microbatches)
    programs = staged.programs(microbatches, schedule)
    sent = {
        actor: sum(
            op.inputs[0].num_bytes
            for op in program.graph.ops
            if op.type == "Send" and op.inputs[0].shape  # but for the loss that is given
        )
        for actor, program in enumerate(programs)
    }
    _, found = priced_in_stages(staged.step, staged.stage, schedule, machines())
    for actor, num_bytes in sent.items():
        shares = [found.stages[stage] for stage in schedule.stages_of(actor)]
        assert sum(share.sent_bytes for share in shares) == num_bytes > 0


@pytest.mark.parametrize("name", ["gpt", "unet"])
def test_ranks_of_unequal_shares_send_what_each_is_priced_to(name):
    staged, schedule = Staged.of(name, 2), generate("1f1b", 2, 2)
    (samples,) = {t.shape[0] for t in staged.problem.step.batched}
    mesh = UnevenMesh.over(staged.plan.mesh, 0, (samples // 2 - 1, 1))
    programs = staged.programs(2, schedule, shares=mesh)
    priced = [staged.priced(2, shares=mesh.seen_from(rank)) for rank in (0, 1)]
    for actor, program in enumerate(programs):
        sent = [op.inputs[0] for op in program.graph.ops if op.type == "Send"]
        each = []
        for rank, prices in enumerate(priced):
            shapes = [program.shape_on(rank, tensor) for tensor in sent]
            found = staged_cost(prices, schedule, prices.run(schedule)).stages[actor]
            each.append(found.sent_bytes)
            assert found.sent_bytes == sum(
                math.prod(shape) * itemsize(tensor.dtype)
                for shape, tensor in zip(shapes, sent, strict=True)
                if shape
            )
        assert each[0] > each[1] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("clip_4_layers", "gshard_moe", "penalized"),
        *at_night("resnet", "gpt_mixed", "dnabert", "t5_3_layers"),
    ],
)
def test_what_other_models_send_is_what_their_programs_send(name):
    staged, schedule = Staged.of(name, 3), generate("1f1b", 3, 4)
    sent = sum(
        op.inputs[0].num_bytes
        for program in staged.programs(4, schedule)
        for op in program.graph.ops
        if op.type == "Send" and op.inputs[0].shape
    )
    _, found = priced_in_stages(staged.step, staged.stage, schedule, machines())
    assert sum(share.sent_bytes for share in found.stages) == sent > 0


@pytest.mark.slow
@pytest.mark.parametrize("name, num_stages", [("unet", 2), ("gpt", 3)])
def test_transfers_begin_when_programs_ask_for_them(name, num_stages):
    """Over fast links: once it is made and asked for, whichever comes last."""
    staged, schedule = Staged.of(name, num_stages), generate("gpipe", num_stages, 8)
    timeline = staged.priced(8, machines(1e15)).run(schedule)
    begun = {sent.edge[:2]: sent.start for sent in timeline.transfers}
    ended = {ran.task: ran.end for ran in timeline.events}
    waited = 0
    for order, program in zip(schedule.orders, staged.programs(8, schedule), strict=True):
        calls = [op for op in program.graph.ops if op.type == TASK]
        task_of = dict(zip(calls, order, strict=True))
        for call in calls:
            for asked in (t.op for t in call.inputs if t.op.type == "Recv" and t.op.control):
                (before,), reader = (task_of[c] for c in asked.control), task_of[call]
                makers = [a for a, b in begun if b == reader and a.micro == reader.micro]
                for maker in makers:
                    assert begun[maker, reader] == max(ended[before], ended[maker])
                    waited += ended[before] > ended[maker]
    assert waited


def pairs(between: float, within: float) -> Cluster:
    """Nodes of two devices, each a stage's, with so many bytes/s between and within them."""
    return Cluster.regular("pairs", DEVICE, [Level(4, between, 1e-6), Level(2, within, 1e-7)])


SLOW, QUICK = pairs(1e8, 1e12), pairs(1e12, 1e9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "family"),
    some_first(
        [("gpt", "1f1b"), ("unet", "zb-h1"), ("gpt", "interleaved")],
        itertools.product(("gpt", "gpt_mixed", "unet", "t5_3_layers"), FAMILIES),
    ),
)
def test_slow_links_carry_slices_of_what_ranks_hold_alike(name, family):
    """As often, and as large, as programs send them."""
    staged, schedule = Staged.of(name, 2 + 2 * (family == "interleaved"), 2), generate(family, 2, 4)
    found = []
    for cluster in (QUICK, SLOW):
        programs = staged.programs(4, schedule, cluster)
        sends = [[op.inputs[0] for op in p.graph.ops if op.type == "Send"] for p in programs]
        sent = [sum(t.num_bytes for t in tensors if t.shape) for tensors in sends]
        _, priced = priced_in_stages(staged.step, staged.stage, schedule, cluster)
        shares = [[priced.stages[s].sent_bytes for s in schedule.stages_of(a)] for a in range(2)]
        assert [sum(own) for own in shares] == sent
        found.append(sent)
    whole, sliced = found
    assert sliced == [num_bytes // 2 for num_bytes in whole]


def test_a_stage_waits_for_what_it_gathers():
    """In the task that reads it first, and the links between stages carry half as much."""
    staged = Staged.of("gpt", 2, 2)
    whole, sliced = (staged.priced(4, cluster) for cluster in (QUICK, SLOW))
    assert [link.forward_bytes for link in sliced.graph.links] == pytest.approx(
        [link.forward_bytes / 2 for link in whole.graph.links]
    )
    gathered = whole.graph.links[0].forward_bytes
    seconds = collective_seconds("all_gather", (1,), gathered, staged.plan.mesh, SLOW)
    without = [
        StageTransfers(staged.cut(4), (0, 1), None),
        StageTransfers(staged.cut(4), (0, 1), ScatterGatherCost((staged.plan.mesh,) * 2, SLOW)),
    ]
    parts = [SLOW.part(range(2)), SLOW.part(range(2, 4))]
    (first, second), (_, reading) = (stage_prices(transfers, parts) for transfers in without)
    assert reading.waiting_s["F"] == pytest.approx(second.waiting_s["F"] + seconds)
    assert reading.collectives == second.collectives + 4
    assert sliced.stages[0].waiting_s["W"] > first.waiting_s["W"]
    assert sliced.stages[1].cost.kept_bytes == whole.stages[1].cost.kept_bytes


def test_a_stage_that_recomputes_keeps_slices():
    staged, schedule = Staged.of("gpt", 2, 2), generate("1f1b", 2, 4)
    whole, sliced = (staged.priced(4, cluster, recompute=True) for cluster in (QUICK, SLOW))
    (link,) = whole.graph.links
    kept, less = (prices.stages[1].cost.kept_bytes for prices in (whole, sliced))
    assert less == pytest.approx(kept - link.forward_bytes / 2)
    # It gathers twice: before its backward pass, too.
    waits = [staged.priced(4, SLOW, recompute=again).stages[1].waiting_s for again in (False, True)]
    assert waits[1]["I"] == pytest.approx(waits[0]["I"] + waits[0]["F"])
    programs = staged.programs(4, schedule, SLOW, recompute=True)
    for price, found, program in zip(
        sliced.stages, sliced.run(schedule).peaks, programs, strict=True
    ):
        held = found.num_bytes - price.weight_bytes - price.state_bytes
        assert held == pytest.approx(most_stored(program), rel=0.1)


@pytest.mark.parametrize("name", ["dnabert", *at_night("t5_3_layers")])
def test_a_tied_weight_is_sent_once_a_step_and_its_gradient_too(name):
    staged = Staged.of(name, 2)
    table = next(v for v in staged.step.problem.step.variables if v.name == "tokens/embeddings")
    found = {}
    for microbatches in (2, 4):
        prices = staged.priced(microbatches)
        transfers = prices.run(generate("1f1b", 2, microbatches)).transfers
        for carries in ("weights", "sum"):
            sizes = [t.edge.num_bytes for t in transfers if t.edge.carries == carries]
            found[carries, microbatches] = sizes
            assert len(sizes) == 1 and sizes[0] >= table.num_bytes
    assert found["weights", 2] == found["weights", 4] and found["sum", 2] == found["sum", 4]


@pytest.mark.parametrize(
    "name",
    ["gpt", *at_night("t5_3_layers", "unet")],
)
def test_a_slower_link_makes_a_step_longer(name):
    staged, schedule = Staged.of(name, 4), generate("1f1b", 4, 4)
    taken = [
        staged.priced(4, machines(between)).run(schedule).seconds
        for between in (1e12, 1e7, 1e6, 1e5)
    ]
    assert taken == sorted(taken) and len({*taken}) == 4


def test_links_within_a_node_and_between_nodes():
    """Two stages of two ranks lie in one node of four; the next two in another."""
    staged, schedule = Staged.of("gpt", 4), generate("1f1b", 4, 4)
    prices = staged.priced(4, machines(1e6, 1e9))
    ends = {}
    for sent in prices.run(schedule).transfers:
        if sent.edge.carries == "activations":
            pair = sent.edge.producer.stage, sent.edge.consumer.stage
            ends.setdefault(pair, []).append(sent.end - sent.start)
    assert min(ends[1, 2]) > 100 * max(ends[0, 1])
    assert max(ends[2, 3]) < min(ends[1, 2])
