"""Stages add up their own operands of a sum, and send one tensor."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cases import amounts, seeds
from tests.pipeline.arithmetic import Arithmetic, N, at_random, run
from tests.pipeline.sent import Sent
from tests.pipeline.sent import sent as all_sent
from tfpar.ir import Op, format_graph
from tfpar.pipeline.partial_sums import sum_by_stage


def without_constants(made: Arithmetic, stage: dict[Op, int]) -> list[Sent]:
    return [each for each in all_sent(made.graph, stage) if each.tensor.op.type != "Const"]


def sent(made: Arithmetic, stage: dict[Op, int]) -> list[tuple[int, int]]:
    """(from, to) of all that is sent but constants."""
    return sorted((source, target) for _, source, target in without_constants(made, stage))


def num_bytes(made: Arithmetic, stage: dict[Op, int]) -> int:
    return sum(t.num_bytes for t, _, _ in without_constants(made, stage))


def summed(made: Arithmetic) -> dict[Op, int]:
    """The stages after the pass; the graph still computes the same."""
    before = run(made.graph, made.fed)
    found = sum_by_stage(made.graph, made.stages())
    assert [*found] == made.graph.ops
    assert len({op.name for op in found}) == len(found)
    after = run(made.graph, made.fed)
    assert before.keys() == after.keys()
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value)
    return found


# --- additions ----------------------------------------------------------------------------------


def test_a_stage_sends_the_sum_of_its_own():
    made = Arithmetic()
    own, *rest = (made.source(s) for s in (0, 1, 1, 2, 2, 2, 3))
    total = made.sum(0, *rest, own)
    made.graph.outputs = [total]
    found = summed(made)
    assert sent(made, found) == [(1, 0), (2, 0), (3, 0)]
    parts = [f"op/AddN/stage_{s}:0" for s in (1, 2)]
    assert [t.name for t in total.op.inputs] == [*parts, "s3:0", "s0:0"]
    counts = {op.name: len(op.inputs) for op in found if op.type == "AddN"}
    assert counts == {"op/AddN": 4, "op/AddN/stage_1": 2, "op/AddN/stage_2": 3}


def test_the_stage_of_the_sum_adds_up_its_own_apart():
    """So that what comes of others is added to what is whole by then."""
    made = Arithmetic()
    first, second, other = made.source(0), made.source(0), made.source(1)
    view = made.at(0, made.build.reshape(made.source(2, (2, 3)), (N,)))
    total = made.sum(0, first, view, other, second)
    made.graph.outputs = [total]
    before = sent(made, made.stages())
    found = summed(made)
    assert sent(made, found) == before == [(1, 0), (2, 0)]
    own, *rest = (t.op for t in total.op.inputs)
    assert own.inputs == [first, second] and rest == [view.op, other.op]


def test_sums_that_lead_to_a_sum_are_one_with_it():
    """Whatever stage they are in, of two or of many terms."""
    made = Arithmetic()
    a, b, c, d = (made.source(s) for s in (2, 2, 1, 2))
    first = made.sum(1, a, c, op_type="AddV2")
    second = made.sum(0, first, b, op_type="Add")
    total = made.sum(0, second, d, made.source(0))
    made.graph.outputs = [total]
    assert sent(made, made.stages()) == [(1, 0), (2, 0), (2, 0), (2, 1)]
    assert sent(made, summed(made)) == [(1, 0), (2, 0)]


def test_a_sum_that_others_read_too_is_an_operand():
    made = Arithmetic()
    a, b, c = (made.source(s) for s in (1, 1, 0))
    first = made.sum(0, a, c)
    total = made.sum(0, first, b)
    made.graph.outputs = [total, first]
    text = format_graph(made.graph)
    assert sent(made, summed(made)) == [(1, 0), (1, 0)]
    assert format_graph(made.graph) == text


def test_a_tensor_that_is_sent_anyway_is_not_added_before():
    made = Arithmetic()
    a, b, c = (made.source(1) for _ in range(3))
    total = made.sum(0, a, b, made.source(0))
    read = made.at(0, made.build.unary("Neg", a))
    made.graph.outputs = [total, read]
    text = format_graph(made.graph)
    summed(made)
    assert format_graph(made.graph) == text
    more = made.sum(0, a, b, c)
    made.graph.outputs.append(more)
    assert len(sent(made, made.stages())) == 3
    summed(made)
    assert format_graph(made.graph) != text


def test_what_is_reshaped_on_the_way_is_reshaped_where_it_is_made():
    """Gradients of products in two dimensions, of what has three."""
    made = Arithmetic()
    flat = [made.source(1) for _ in range(3)]
    views = [made.at(0, made.build.reshape(t, (2, 3))) for t in flat]
    total = made.sum(0, *views, made.source(0, (2, 3)))
    made.graph.outputs = [total]
    assert len(sent(made, made.stages())) == 3
    found = summed(made)
    assert sent(made, found) == [(1, 0)]
    assert [found[t.op] for t in views] == [1, 1, 1]


@pytest.mark.parametrize(("rows", "sends"), [(1, 1), (2, 3)])
def test_a_sum_over_nothing_is_a_view(rows, sends):
    """As in gradients of what may have been spread; one over something makes it smaller."""
    made = Arithmetic()
    terms = [made.source(1, (rows, N)) for _ in range(3)]
    sums = [made.at(0, made.build.reduce("Sum", t, [0])) for t in terms]
    made.graph.outputs = [made.sum(0, *sums, made.source(0))]
    assert len(sent(made, summed(made))) == sends


def test_one_that_is_reshaped_alone_stays():
    made = Arithmetic()
    view = made.at(0, made.build.reshape(made.source(1), (2, 3)))
    made.graph.outputs = [made.sum(0, view, made.source(0, (2, 3)))]
    assert summed(made)[view.op] == 0


@pytest.mark.parametrize(("count", "sends"), [(1, 1), (2, 1), (3, 1)])
def test_halves_that_are_widened_are_added_where_it_is_no_more_to_send(count, sends):
    """Two of 16 bits are as many bytes as their sum, and one message more."""
    made = Arithmetic()
    halves = [made.source(1, dtype="float16") for _ in range(count)]
    wide = [made.at(0, made.build.cast(t, "float32")) for t in halves]
    made.graph.outputs = [made.sum(0, *wide, made.source(0))]
    before = num_bytes(made, made.stages())
    found = summed(made)
    assert len(sent(made, found)) == sends
    assert num_bytes(made, found) == min(before, 4 * N)


def test_a_sum_that_reads_one_other_stage_alone_runs_there():
    made = Arithmetic()
    total = made.sum(0, made.source(1), made.source(1))
    made.graph.outputs = [made.at(0, made.build.unary("Neg", total))]
    found = summed(made)
    assert found[total.op] == 1
    assert sent(made, found) == [(1, 0)]


def test_a_sum_that_spreads_a_term_stays():
    made = Arithmetic()
    small = [made.source(1, ()) for _ in range(2)]
    whole = made.build.binary(
        "AddV2", made.build.binary("AddV2", made.source(0), small[0]), small[1]
    )
    made.graph.outputs = [whole]
    text = format_graph(made.graph)
    summed(made)
    assert format_graph(made.graph) == text


def test_what_waits_or_is_waited_for_stays():
    made = Arithmetic()
    inner = made.sum(0, made.source(1), made.source(0))
    total = made.sum(0, inner, made.source(1))
    last = made.at(0, made.build.unary("Neg", total))
    last.op.control.append(inner.op)
    made.graph.outputs = [last]
    text = format_graph(made.graph)
    summed(made)
    assert format_graph(made.graph) == text


# --- reductions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("op_type", ["Sum", "Max"])
def test_norms_of_all_gradients_are_added_up_by_stage(op_type):
    made = Arithmetic()
    scalars = [made.source(s, ()) for s in (0, 2, 1, 1, 2, 2, 0, 3)]
    made.graph.outputs = [made.reduced(0, op_type, *scalars)]
    found = summed(made)
    assert sent(made, found) == [(1, 0), (2, 0), (3, 0)]
    pack = made.graph.outputs[0].op.inputs[0].op
    assert pack.attrs["N"] == len(pack.inputs) == 5
    assert pack.outputs[0].shape == (5,)


def test_a_pack_that_others_read_stays():
    made = Arithmetic()
    scalars = [made.source(1, ()) for _ in range(3)]
    total = made.reduced(0, "Sum", *scalars)
    made.graph.outputs = [total, total.op.inputs[0]]
    text = format_graph(made.graph)
    summed(made)
    assert format_graph(made.graph) == text


def test_a_reduction_of_other_dims_stays():
    made = Arithmetic()
    rows = [made.source(1) for _ in range(3)]
    pack = made.reduced(0, "Sum", *rows).op.inputs[0]
    made.graph.ops = [op for op in made.graph.ops if op.type != "Sum"]
    made.graph.outputs = [made.at(0, made.build.reduce("Sum", pack, [1]))]
    text = format_graph(made.graph)
    summed(made)
    assert format_graph(made.graph) == text


# --- at random ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", seeds(30, 150))
def test_the_same_is_computed_and_no_more_is_sent(seed):
    rng = np.random.default_rng(seed)
    made = at_random(rng, int(rng.integers(2, 5)))
    before = made.stages()
    messages, size = len(sent(made, before)), num_bytes(made, before)
    found = summed(made)
    assert (num_bytes(made, found), len(sent(made, found))) <= (size, messages)


@pytest.mark.parametrize("trials", amounts(30, 150))
def test_some_of_them_send_less(trials):
    less = 0
    for seed in range(trials):
        rng = np.random.default_rng(seed)
        made = at_random(rng, int(rng.integers(2, 5)))
        before = num_bytes(made, made.stages())
        less += num_bytes(made, summed(made)) < before
    assert less > trials / 3


@pytest.mark.parametrize("seed", seeds(12, 50))
def test_of_a_tree_each_stage_sends_once(seed):
    """The least that can be: whatever the stages of the sums between."""
    rng = np.random.default_rng(seed)
    made = Arithmetic()
    level = [made.source(int(s)) for s in rng.integers(4, size=rng.integers(3, 12))]
    stages = {made.stage[t.op] for t in level}
    while len(level) > 1:
        count = min(len(level), int(rng.integers(2, 4)))
        at = int(rng.integers(4)) if len(level) > count else 0
        level = [*level[count:], made.sum(at, *level[:count])]
    made.graph.outputs = [made.at(0, made.build.unary("Neg", level[0]))]
    assert len(sent(made, summed(made))) == len(stages - {0})


@pytest.mark.parametrize("seed", seeds(5, 20))
def test_one_stage_stays_as_it_is(seed):
    made = at_random(np.random.default_rng(seed), 1)
    text = format_graph(made.graph)
    assert sum_by_stage(made.graph, made.stages()) == dict.fromkeys(made.graph.ops, 0)
    assert format_graph(made.graph) == text
