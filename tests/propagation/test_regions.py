"""Loops, branches and calls: bodies in which nothing crosses ranks."""

from __future__ import annotations

import pytest

from tests.propagation.by_hand import FLOAT, GRID, PAIR, ByHand, before, begun
from tfpar.ir import DType, FunctionRef, Graph, Op
from tfpar.propagation.decide import ImmovableInputError
from tfpar.propagation.prepared_graph import PreparedGraph
from tfpar.propagation.regions import partition_region
from tfpar.spec import parse_spec


def run(prepared: PreparedGraph, op: Op, *laid: str, mesh=PAIR, **given):
    """(specs in, specs out, axes held whole) of the region `op`."""
    decision, held = partition_region(before(op, prepared, mesh, {}, laid, **given), op)
    return decision.strategy.in_specs, decision.strategy.out_specs, held


def texts(*specs: str):
    return tuple(map(parse_spec, specs))


# --- calls ----------------------------------------------------------------------------------


def called(make, *shapes):
    """A call of the function that `make` makes of inputs of these shapes."""
    body = ByHand()
    body.graph.outputs = [make(body, *(body.fed(f"a{i}", *s) for i, s in enumerate(shapes)))]
    build = ByHand()
    inputs = [build.fed(f"x{i}", *shape) for i, shape in enumerate(shapes)]
    made = [(t.shape, t.dtype) for t in body.graph.outputs]
    op = build.emit("PartitionedCall", inputs, made, {"f": FunctionRef("body")})
    build.graph.functions["body"] = body.graph
    return build.prepared(*op.outputs), op


def product():
    return called(lambda body, x, y: body.product(x, y), (4, 6), (6, 8))


def test_a_body_goes_on_with_what_comes_split():
    prepared, op = product()
    assert run(prepared, op, "S(0)", "R") == (texts("S(0)", "R"), texts("S(0)"), ())


def test_sums_come_out_of_a_body_as_they_are():
    prepared, op = product()
    assert run(prepared, op, "S(1)", "S(0)") == (texts("S(1)", "S(0)"), texts("P(sum)"), ())


def test_where_a_body_would_need_a_collective_its_inputs_come_whole():
    prepared, op = called(lambda body, x: body.one("Mystery", (x,), (4, 6), "float32"), (4, 6))
    assert run(prepared, op, "S(0)") == (texts("R"), texts("R"), (0,))
    found = run(prepared, op, "R,S(0)", mesh=GRID)
    assert found == (texts("R,R"), texts("R,R"), (1,)), "along that axis only"


def test_a_body_in_a_body_leaves_it_to_the_op_around_it():
    prepared, op = called(lambda body, x: body.one("Mystery", (x,), (4, 6), "float32"), (4, 6))
    with pytest.raises(ImmovableInputError):
        run(prepared, op, "S(0)", confined=True)


def test_an_op_that_must_be_whole_is():
    prepared, op = product()
    found = run(prepared, op, "S(0)", "R", whole=frozenset({(op, 0)}))
    assert found == (texts("R", "R"), texts("R"), (0,))


def test_sums_are_reduced_before_they_enter():
    prepared, op = called(lambda body, x: body.unary("Relu", x), (4, 6))
    state = begun(prepared, PAIR, {}, ["R"])
    state.specs[op.inputs[0]] = parse_spec("P(sum)")
    decision, _ = partition_region(state, op)
    assert decision.strategy.in_specs == texts("R")


def test_weights_are_gathered_before_anything_else_is():
    """Rows that come split stay split where it is the weight that cannot."""
    body = ByHand()
    x, w = body.fed("x", 4, 6), body.fed("w", 6, 8)
    body.graph.outputs = [body.product(x, body.one("Mystery", (w,), (6, 8), "float32"))]
    build = ByHand()
    inputs = build.fed("x", 4, 6), build.weight("w", 6, 8)
    op = build.emit("PartitionedCall", inputs, [((4, 8), "float32")], {"f": FunctionRef("body")})
    build.graph.functions["body"] = body.graph
    prepared = build.prepared(*op.outputs)
    state = before(op, prepared, PAIR, {"w": "S(0)"}, ["S(0)"])
    decision, held = partition_region(state, op)
    assert decision.strategy.in_specs == texts("S(0)", "R") and held == ()


def test_what_is_remembered_is_that_of_the_specs_that_arrive():
    prepared, op = product()
    first, _ = partition_region(begun(prepared, PAIR, {}, ["S(0)", "R"]), op)
    again, _ = partition_region(begun(prepared, PAIR, {}, ["S(0)", "R"]), op)
    other, _ = partition_region(begun(prepared, PAIR, {}, ["R", "R"]), op)
    assert first is again is not other


# --- branches --------------------------------------------------------------------------------


def branched(first, second, shape=(4, 4)):
    """One of two functions of a tensor."""
    build = ByHand()
    test, x = build.fed("test", dtype="bool"), build.fed("x", *shape)
    for name, make in (("first", first), ("second", second)):
        body = ByHand()
        body.graph.outputs = [make(body, body.fed("a", *shape))]
        build.graph.functions[name] = body.graph
    attrs = {"then_branch": FunctionRef("first"), "else_branch": FunctionRef("second")}
    op = build.emit("StatelessIf", (test, x), [(shape, "float32")], attrs)
    return build.prepared(*op.outputs), op


def relu(body, x):
    return body.unary("Relu", x)


def turned(body, x):
    return body.transpose(x, (1, 0))


def constant(body, x):
    return body.reshape(body.const([[1.0] * 4] * 4, "float32"), (4, 4))


def test_branches_that_agree_give_what_both_give():
    prepared, op = branched(relu, relu)
    assert run(prepared, op, "R", "S(0)") == (texts("R", "S(0)"), texts("S(0)"), ())


def test_what_is_whole_in_one_branch_is_cut_as_the_other_gives_it():
    prepared, op = branched(relu, constant)
    assert run(prepared, op, "R", "S(0)") == (texts("R", "S(0)"), texts("S(0)"), ())


def test_branches_that_contradict_each_other_run_whole():
    prepared, op = branched(relu, turned)
    assert run(prepared, op, "R", "S(0)") == (texts("R", "R"), texts("R"), (0,))


def test_what_the_branch_hangs_on_is_whole():
    prepared, op = branched(relu, relu)
    (condition, _), _, _ = run(prepared, op, "R,R", "S(0),R", mesh=GRID)
    assert condition == parse_spec("R,R")


def test_a_branch_of_zeros_gives_them_as_the_other_branch_gives_its_values():
    """Cut where those are split: nothing crosses ranks."""
    prepared, op = branched(constant, relu)
    assert run(prepared, op, "R", "S(1)") == (texts("R", "S(1)"), texts("S(1)"), ())


# --- loops -----------------------------------------------------------------------------------


def loop(carried, *shapes: tuple[int, ...], until=None):
    """A loop over a counter and tensors of these shapes, of which `carried` makes the next.

    Args:
        until: what has to hold of counter and tensors; by default, that the count is below 3.
    """

    def body(name: str) -> tuple[ByHand, list]:
        build = ByHand()
        given = [build.fed(f"{name}{i}", *shape) for i, shape in enumerate(shapes)]
        return build, [build.fed("count", dtype="int32"), *given]

    step, (count, *given) = body("s")
    step.graph.inputs = [count, *given]
    one = step.const(1, "int32")
    following = step.one("AddV2", (count, one), (), "int32", {"T": DType("int32")})
    step.graph.outputs = [following, *carried(step, *given)]
    test, (count, *given) = body("t")
    test.graph.inputs = [count, *given]
    short = until or (lambda build, count, *_: build.binary("Less", count, build.const(3, "int32")))
    test.graph.outputs = [short(test, count, *given)]
    build = ByHand()
    inputs = [build.fed("count", dtype="int32")]
    inputs += [build.fed(f"x{i}", *shape) for i, shape in enumerate(shapes)]
    functions: dict[str, Graph] = {"step": step.graph, "test": test.graph}
    build.graph.functions |= functions
    attrs = {"body": FunctionRef("step"), "cond": FunctionRef("test")}
    op = build.emit("StatelessWhile", inputs, [(t.shape, t.dtype) for t in inputs], attrs)
    return build.prepared(*op.outputs), op


def test_a_loop_carries_what_it_was_given():
    prepared, op = loop(lambda build, x: [build.unary("Relu", x)], (4, 6))
    assert run(prepared, op, "R", "S(0)") == (texts("R", "S(0)"), texts("R", "S(0)"), ())


def test_what_a_round_splits_comes_split_from_the_start():
    """A whole sum is cut before the first round, to which rows are added that come split."""
    prepared, op = loop(
        lambda build, total, x: [build.binary("AddV2", total, x), x], (4, 6), (4, 6)
    )
    found = run(prepared, op, "R", "R", "S(0)")
    assert found == (texts("R", "S(0)", "S(0)"), texts("R", "S(0)", "S(0)"), ())


def test_sums_over_ranks_are_added_up_within_the_loop_and_reduced_after_it():
    """The gradient of a weight in a backward loop."""

    def grown(build, total, x, y):
        made = build.product(x, y, (True, False))
        inputs, attrs = (total, made), {"T": FLOAT, "N": 2}
        return [build.one("AddN", inputs, total.shape, "float32", attrs), x, y]

    prepared, op = loop(grown, (6, 8), (4, 6), (4, 8))
    zeros = frozenset({op.inputs[1]})
    into, out, held = run(prepared, op, "R", "R", "S(0)", "S(0)", zeros=zeros)
    assert into[1] == out[1] == parse_spec("P(sum)") and not held


def test_a_condition_is_whole_on_every_rank():
    """Else ranks would run the body so many times each: what it sums is gathered first."""
    prepared, op = loop(
        lambda build, x: [build.unary("Relu", x)],
        (4, 6),
        until=lambda build, count, x: build.binary(
            "Less", build.reduce("Sum", x, [0, 1]), build.const(9.0, "float32")
        ),
    )
    assert run(prepared, op, "R", "S(0)") == (texts("R", "R"), texts("R", "R"), (0,))


def test_a_loop_that_turns_what_it_carries_runs_whole():
    prepared, op = loop(lambda build, x: [build.transpose(x, (1, 0))], (4, 4))
    assert run(prepared, op, "R", "S(0)") == (texts("R", "R"), texts("R", "R"), (0,))
