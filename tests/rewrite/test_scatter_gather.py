"""What ranks hold alike goes from stage to stage in slices, and comes to the same."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.cut_steps import Staged, attending, cut, normalized, three_layers, tied, traced
from tests.rewrite.test_stage_split import staged
from tfpar.cluster import Cluster, Device, Level
from tfpar.compile.local.local_graph import TASK
from tfpar.compile.local.scatter_gather import Slicing
from tfpar.cost import ScatterGatherCost
from tfpar.pipeline import generate
from tfpar.spec import Mesh, Replicate, Shard

MODEL = Mesh.of({"data": 1, "model": 2})
ACROSS = ((Replicate(), Shard(1)), (Replicate(), Shard(0)), (Replicate(), Replicate()))
"""Weights of a pair of layers as Megatron-LM splits them; the third is on all ranks."""


def slices(mesh: Mesh, between: float = 1e5, within: float = 1e15) -> Slicing:
    """On machines of a stage each, with so many bytes/s between and within them."""
    levels = [Level(4, between, 0.0), Level(mesh.size, within, 0.0)]
    return ScatterGatherCost(
        (mesh,) * 4, Cluster.regular("slow", Device({"float32": 1e9}, 1e9, 1e9), levels)
    )


def sent_bytes(found: Staged, parts: int = 1) -> list[int]:
    """Of a rank of each actor, if of what can be cut in so many parts it sends one."""
    return [
        sum(t.num_bytes // (1 if t.num_elements % parts else parts) for t in sent)
        for sent in found.sent()
    ]


def gathers(found: Staged) -> list[Sequence[int]]:
    """The axes of all-gathers, in tasks and between them."""
    graphs = found.whole.graphs()
    return [op.attrs["axes"] for graph in graphs for op in graph.ops if op.type == "AllGather"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "interleaved", "zb-v"])
@pytest.mark.parametrize("function", [three_layers, tied, attending])
def test_every_schedule_computes_the_step(function, name):
    step, schedule = traced(function, 16), generate(name, 2, 4)
    whole = cut(step, schedule, MODEL)
    found = staged(step, schedule, MODEL, slicing=slices(MODEL))
    assert sent_bytes(found) == sent_bytes(whole, 2) < sent_bytes(whole)
    in_tasks = [op.type for graph in found.whole.graphs()[1:] for op in graph.ops]
    assert "AllGather" in in_tasks and not gathers(whole)
    for actor, order in enumerate(schedule.orders):
        ran = found.calls(actor)
        assert ran == [str(task) for task in order if str(task) in ran]


@pytest.mark.parametrize(
    ("mesh", "axes", "parts"),
    [
        (Mesh.of({"data": 1, "model": 4}), (1,), 4),
        (Mesh.of({"data": 2, "model": 2}), (1,), 2),  # the batch is cut along the first
        (Mesh.of({"data": 1, "rows": 2, "columns": 2}), (1, 2), 4),
    ],
)
@pytest.mark.parametrize("microbatches", [1, 4])
def test_each_of_the_ranks_that_hold_a_tensor_sends_its_part(mesh, axes, parts, microbatches):
    step, schedule = traced(rows=16), generate("1f1b", 2, microbatches)
    whole, found = cut(step, schedule, mesh), staged(step, schedule, mesh, slicing=slices(mesh))
    assert sent_bytes(found) == sent_bytes(whole, parts) < sent_bytes(whole)
    assert {*gathers(found)} == {axes}


def test_layers_split_within_stages():
    step, schedule = traced(rows=16), generate("1f1b", 2, 4)
    whole = cut(step, schedule, MODEL, weights=ACROSS)
    found = staged(step, schedule, MODEL, weights=ACROSS, slicing=slices(MODEL))
    # What is split goes as it is.
    assert sent_bytes(whole, 2) < sent_bytes(found) < sent_bytes(whole)


def test_tensors_that_do_not_divide_go_whole():
    step, schedule = traced(rows=12), generate("1f1b", 2, 4)  # 3 rows of 5 entries
    whole, found = cut(step, schedule, MODEL), staged(step, schedule, MODEL, slicing=slices(MODEL))
    tasks = [t.shape for sent in found.sent() for t in sent if t.op.type == TASK]
    assert tasks.count((3, 5)) == 2 * 4, "there and back"
    assert sent_bytes(found) == sent_bytes(whole, 2)


@pytest.mark.slow
def test_ragged_batches_joins_and_recompute():
    mesh = Mesh.of({"data": 2, "model": 2})
    step, schedule = traced(rows=15), generate("1f1b", 2, 2)  # 4 rows on a rank, but for the last
    assert gathers(staged(step, schedule, mesh, slicing=slices(mesh)))
    assert gathers(staged(step, schedule, mesh, recompute=True, slicing=slices(mesh)))
    step = traced(normalized, 16)
    assert gathers(staged(step, schedule, MODEL, slicing=slices(MODEL)))


def test_recomputing_stages_keep_slices():
    """They gather again what they read again."""
    step, schedule = traced(rows=16), generate("1f1b", 2, 4)
    found = staged(step, schedule, MODEL, recompute=True, slicing=slices(MODEL))
    (body,) = (g for name, g in found.whole.graph.functions.items() if name == "round1_B1")
    assert "AllGather" in {op.type for op in body.ops}


def test_three_stages_of_which_two_read_a_tensor():
    """It is sliced once, and gathered by each."""
    step, schedule = traced(attending, 16), generate("1f1b", 3, 4)
    whole, found = cut(step, schedule, MODEL), staged(step, schedule, MODEL, slicing=slices(MODEL))
    assert sent_bytes(found) == sent_bytes(whole, 2) < sent_bytes(whole)


def test_links_that_are_alike_carry_tensors_whole():
    step, schedule = traced(rows=16), generate("1f1b", 2, 4)
    plain = cut(step, schedule, MODEL)
    quick = slices(MODEL, between=4e9, within=1e9)
    found = cut(step, schedule, MODEL, slicing=quick)
    assert str(found.whole) == str(plain.whole)
