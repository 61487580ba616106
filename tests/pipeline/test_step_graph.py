"""What the stages of a step send each other, and when."""

from __future__ import annotations

import pytest

from tests.graphs import saved
from tests.pipeline.test_step_stages import N, Step, two_layers
from tfpar.ir import BACKWARD, Op, Roles, planning_graph
from tfpar.pipeline.generators import generate
from tfpar.pipeline.graph import check_schedule
from tfpar.pipeline.stage_graph import Join, StageGraph, StageLink, Tie
from tfpar.pipeline.step_graph import (
    Runs,
    crossings,
    find_weight_half,
    is_synchronized,
    stage_graph_of,
)
from tfpar.pipeline.step_stages import stages_of_step
from tfpar.planning.inter_op import assign_step
from tfpar.spec import PlanError, ScheduleError

SIZE = 4 * N * N  # of a matrix of a step by hand


def found(step: Step, num_stages: int = 2, once=(), met=(), stage=None) -> StageGraph:
    """The stage graph of a step by hand.

    Args:
        once: names of ops that run once, of those that depend on what is fed.
        met: (name of an op, position) of what else it reads of all microbatches.
    """
    graph = step.build.graph
    roles = Roles.of(graph, step.gradients)
    stage = stage or stages_of_step(graph, roles, step.forward)
    runs = Runs.without_joins(graph, roles)
    each = runs.each - {step.named[name] for name in once}
    runs = Runs(each, runs.met | {(step.named[name], at) for name, at in met})
    return stage_graph_of(graph, roles, stage, num_stages, runs=runs)


def sent(step: Step) -> dict[str, str]:
    """What each tensor that crosses is, by the name that it is asked about by."""
    graph = step.build.graph
    roles = Roles.of(graph, step.gradients)
    stage = stages_of_step(graph, roles, step.forward)
    names = {op: name for name, op in step.named.items()}
    listed = crossings(graph, roles, stage, Runs.without_joins(graph, roles))
    return {f"{names[c.tensor.op]} {c.source}{c.target}": c.carries for c in listed}


# --- by hand ----------------------------------------------------------------------------------


def test_two_layers():
    """`r` is read in stage 1 by both passes: it is sent once; inputs and constants are not."""
    step = two_layers()
    assert sent(step) == {"r 01": "activations", "dr 10": "gradients"}
    assert found(step) == StageGraph.chain(2, SIZE, SIZE)


def test_a_skip_goes_straight_to_each_stage_that_reads_it():
    step = Step()
    x, a, b, c = step.fed("x"), *(step.variable(name) for name in "abc")
    s = step.op("MatMul", "s", x, step.read(a, "read_a"), stage=0)
    m = step.op("MatMul", "m", s, step.read(b, "read_b"), stage=1)
    step.op("Mul", "y", s, step.op("MatMul", "n", m, step.read(c, "read_c"), stage=2), stage=2)
    assert sent(step) == {"s 01": "activations", "s 02": "activations", "m 12": "activations"}
    links = (StageLink(0, 1, SIZE, None), StageLink(0, 2, SIZE, None), StageLink(1, 2, SIZE, None))
    assert found(step, 3) == StageGraph(3, links)


def test_a_tied_weight_goes_once_a_step_and_so_does_its_gradient():
    step = Step()
    x, table, b = step.fed("x"), step.variable("table"), step.variable("b")
    read, again = step.read(table, "read"), step.read(table, "again")
    e = step.op("MatMul", "e", x, read, stage=0)
    h = step.op("MatMul", "h", e, step.read(b, "read_b"), stage=1)
    y = step.op("MatMul", "y", h, again, stage=2)
    step.op("Mul", "z", y, again, stage=2)
    dy = step.back("Square", "dy", y)
    late = step.back("MatMul", "late", h, dy)
    dh = step.back("MatMul", "dh", dy, again)
    db = step.back("MatMul", "db", e, dh)
    de = step.back("MatMul", "de", dh, step.named["read_b"].outputs[0])
    total = step.op("AddN", "AddN", late, step.back("MatMul", "early", x, de))
    step.gradients = [total, db]
    step.assign("update", table, total)
    assert sent(step) == {
        "e 01": "activations",
        "h 12": "activations",
        "table 02": "weights",
        "late 20": "sum",
        "dh 21": "gradients",
        "de 10": "gradients",
    }
    assert found(step, 3).ties == (Tie(0, 2, SIZE, SIZE),)


def test_a_value_that_is_not_trained_sends_no_gradient():
    step = Step()
    x, scale = step.fed("x"), step.variable("scale", trainable=False)
    read = step.read(scale, "read")
    h = step.op("Mul", "h", x, read, stage=0)
    step.op("Mul", "y", h, read, stage=1)
    assert found(step).ties == (Tie(0, 1, SIZE, None),)


def test_what_is_computed_of_weights_alone_goes_once_a_step():
    step = Step()
    x, w = step.fed("x"), step.variable("w")
    bias = step.op("Square", "bias", step.read(w, "read"), stage=0)
    h = step.op("AddV2", "h", x, bias, stage=0)
    step.op("AddV2", "y", h, bias, stage=1)
    assert sent(step) == {"bias 01": "weights", "h 01": "activations"}
    assert found(step).ties == (Tie(0, 1, SIZE, None),)


def clipped() -> Step:
    """Two layers whose gradients are scaled by their norm."""
    step = two_layers(update=False)
    squares = [step.op("L2Loss", f"square_{t.op.name[-2:]}", t, shape=()) for t in step.gradients]
    norm = step.op("AddN", "norm", *squares, shape=())
    for name, gradient in zip("ab", step.gradients, strict=True):
        handle = step.named[name].outputs[0]
        step.assign(f"update_{name}", handle, step.op("Mul", f"scaled_{name}", gradient, norm))
    return step


@pytest.mark.parametrize("make, waits", [(two_layers, False), (clipped, True)])
def test_updates_wait_for_each_other_where_they_share_a_norm(make, waits):
    step = make()
    graph = step.build.graph
    roles = Roles.of(graph, step.gradients)
    stage = stages_of_step(graph, roles, step.forward)
    listed = crossings(graph, roles, stage, Runs.without_joins(graph, roles))
    assert is_synchronized(listed) == waits
    assert found(step) == StageGraph.chain(2, SIZE, SIZE)


def test_a_learning_rate_is_no_reason_to_wait():
    step = two_layers(update=False)
    rate = step.read(step.variable("rate", (), trainable=False), "read_rate")
    for name, gradient in zip("ab", step.gradients, strict=True):
        handle = step.named[name].outputs[0]
        step.assign(f"update_{name}", handle, step.op("Mul", f"scaled_{name}", gradient, rate))
    assert "scalars" not in sent(step).values()


def test_a_backward_pass_that_reads_of_an_earlier_ones_is_refused():
    step = two_layers()
    graph = step.build.graph
    stage = stages_of_step(graph, Roles.of(graph, step.gradients), step.forward)
    stage[step.named["dr"]], stage[step.named["dh"]] = 0, 1
    with pytest.raises(PlanError, match="stage 1 reads 'gradient_tape/dr:0', which stage 0 makes"):
        found(step, stage=stage)


def test_a_norm_of_the_backward_pass_comes_from_all_stages():
    """A step of the user's clips before the optimizer: no update waits yet, but gradients do."""
    step = two_layers(update=False)
    squares = [step.op("L2Loss", f"l2_{g.op.name}", g, shape=()) for g in step.gradients]
    norm = step.op("Sqrt", "norm", step.op("AddN", "total", *squares, shape=()), shape=())
    step.gradients = [step.op("Mul", f"clipped_{g.op.name}", g, norm) for g in step.gradients]
    for name, gradient in zip("ab", step.gradients, strict=True):
        step.assign(f"update_{name}", step.named[name].outputs[0], gradient)
    assert sent(step)["l2_gradient_tape/da 01"] == "scalars"
    graph = step.build.graph
    assert Roles.of(graph, step.gradients).phase[step.named["norm"]] == BACKWARD
    check_schedule(generate("zb-h1", 2, 3), found(step))


# --- joins ------------------------------------------------------------------------------------


def centred(middle: int, stages: tuple[int, ...] = (0, 1, 2)) -> Step:
    """y = (h - mean(h)) @ b, in three stages, with the mean in one of these."""
    step = Step()
    x, a, b = step.fed("x"), step.variable("a"), step.variable("b")
    h = step.op("MatMul", "h", x, step.read(a, "read_a"), stage=stages[0])
    mean = step.op("Mean", "mean", h, shape=(N,), stage=middle)
    s = step.op("Sub", "s", h, mean, stage=stages[1])
    y = step.op("MatMul", "y", s, step.read(b, "read_b"), stage=stages[2])
    dy = step.back("Square", "dy", y)
    ds = step.back("MatMul", "ds", dy, step.named["read_b"].outputs[0])
    step.gradients = [step.back("MatMul", "da", x, ds), step.back("MatMul", "db", s, dy)]
    return step


def test_a_mean_over_the_batch_joins():
    """The mean is a sum that exists per microbatch; what reads it needs all of them."""
    graph = found(centred(0), 3, met=[("s", 1)])
    assert graph.joins == (Join(0, (("F", 0),), (("F", 1),)),)
    check_schedule(generate("gpipe", 3, 4), graph)
    with pytest.raises(ScheduleError, match="0J0"):
        check_schedule(generate("1f1b", 3, 4), graph)


def test_what_joins_in_the_midst_of_a_stage_holds_up_what_reads_of_it():
    graph = found(centred(1), 3, met=[("s", 1)])
    assert graph.joins == (Join(1, (("F", 1),), (("B", 1), ("F", 2))),)
    check_schedule(generate("gpipe", 3, 4), graph)
    with pytest.raises(ScheduleError, match="1J0"):
        check_schedule(generate("1f1b", 3, 4), graph)


def test_what_only_the_update_waits_for_is_no_join():
    step = two_layers()
    met = [("update_a", 1), ("update_b", 1)]
    assert found(step, met=met) == found(step)


def test_a_join_of_inputs_alone_is_there_as_the_step_begins():
    """Such as the sum of the weights of a batch's samples."""
    step = Step()
    x, weight, a = step.fed("x"), step.fed("weight"), step.variable("a")
    total = step.op("Sum", "total", weight, shape=(), stage=0)
    share = step.op("RealDiv", "share", weight, total, stage=0)
    h = step.op("MatMul", "h", x, step.read(a, "read_a"), stage=0)
    step.op("Mul", "y", h, share, stage=1)
    assert found(step, met=[("share", 1)]).joins == ()
    # A mean of what depends on weights is none.
    assert len(found(centred(0), 3, met=[("s", 1)]).joins) == 1


def test_a_join_reaches_through_what_runs_once():
    """The mean is squared once for all; what reads that waits as well."""
    step = Step()
    x, a = step.fed("x"), step.variable("a")
    h = step.op("MatMul", "h", x, step.read(a, "read_a"), stage=0)
    mean = step.op("Mean", "mean", h, shape=(N,), stage=0)
    square = step.op("Square", "square", mean, shape=(N,), stage=0)
    step.op("Sub", "y", h, square, stage=1)
    graph = found(step, once=["square"], met=[("square", 0)])
    assert graph.joins == (Join(0, (("F", 0),), (("F", 1),)),)


# --- models -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("name", ["gpt", "t5_3_layers", "unet", "dnabert", "penalized"])
def test_stages_of_models_take_any_schedule(name, num_stages):
    step = saved(name)
    graph = planning_graph(step.graph, step.gradients).graph
    roles = Roles.of(graph)
    units, assigned = assign_step(graph, roles, lambda op: 1.0, num_stages)
    stage = stages_of_step(graph, roles, units.forward_stages(assigned.stages))
    stages = stage_graph_of(graph, roles, stage, num_stages)
    neighbours = {(stage, stage + 1) for stage in range(num_stages - 1)}
    assert neighbours <= {(link.source, link.target) for link in stages.links}
    for family in ("gpipe", "1f1b", "zb-h1"):
        check_schedule(generate(family, num_stages, 4), stages)
    tied = {"t5_3_layers": "tokens/embeddings", "dnabert": "tokens/embeddings"}.get(name)
    if tied:
        table = next(v for v in graph.variables if v.name == tied)
        assert any(tie.num_bytes >= table.num_bytes for tie in stages.ties)


# --- backward halves ------------------------------------------------------------------------


def weight_ops(step: Step, met=(), once=()) -> set[str]:
    """The names of the ops of `W`, by which they are asked about."""
    graph = step.build.graph
    roles = Roles.of(graph, step.gradients)
    stage = stages_of_step(graph, roles, step.forward)
    runs = Runs.without_joins(graph, roles)
    each = runs.each - {step.named[name] for name in once}
    runs = Runs(each, frozenset((step.named[name], at) for name, at in met))
    names: dict[Op, str] = {op: name for name, op in step.named.items()}
    return {names[op] for op in find_weight_half(graph, roles, stage, runs)}


@pytest.mark.parametrize("update", [True, False])
def test_gradients_of_weights_are_waited_for_by_nothing_else(update):
    """And the whole backward pass of the first stage: it has nobody to send gradients to."""
    assert weight_ops(two_layers(update)) == {"db", "dh", "da"}


def test_what_leads_to_a_gradient_of_a_weight_alone_goes_with_it():
    step = two_layers(update=False)
    dy = step.named["dy"].outputs[0]
    scaled = step.back("Transpose", "scaled", step.back("Neg", "negative", dy))
    step.gradients[1] = step.back("MatMul", "db_too", step.named["r"].outputs[0], scaled)
    assert {"negative", "scaled", "db_too"} <= weight_ops(step)
    assert "dy" not in weight_ops(step)


def test_what_joins_is_waited_for():
    """A sum over the batch of what is otherwise a weight's: the next pass reads it."""
    step = Step()
    x, a, b = step.fed("x"), step.variable("a"), step.variable("b")
    h = step.op("MatMul", "h", x, step.read(a, "read_a"), stage=0)
    y = step.op("MatMul", "y", h, step.read(b, "read_b"), stage=0)
    dy = step.back("Square", "dy", y)
    mean = step.back("Mean", "mean", dy, shape=(N,))
    ds = step.back("Sub", "ds", dy, mean)
    step.gradients = [step.back("MatMul", "db", h, ds)]
    assert weight_ops(step) == {"dy", "mean", "ds", "db"}
    assert weight_ops(step, met=[("ds", 1)]) == {"ds", "db"}
    scaled = step.back("Neg", "scaled", mean, shape=(N,))
    step.gradients = [step.back("Mul", "again", scaled, ds)]
    assert "mean" in weight_ops(step)
    assert "mean" not in weight_ops(step, once=["scaled"])
