"""The state of a pass: what is given, what is asked of it, and states for parts."""

from tests.propagation.by_hand import PAIR, ByHand, begun, specs
from tfpar.propagation.decide import FREE

(ROWS,) = specs("S(0)")


def test_a_part_sees_what_is_given_and_has_done_nothing():
    build = ByHand()
    x = build.fed("x", 4, 6)
    y = build.product(x, build.weight("kernel", 6, 8))
    prepared = build.prepared(y)
    state = begun(prepared, PAIR, {}, ["S(0)"], whole=frozenset({(y.op, 0)}))
    state.moved.add((x, ROWS))
    (kernel,) = prepared.graph.variables
    seen = dict(state.specs)
    part = state.part(seen, [kernel])
    for name in ("prepared", "mesh", "anchors", "within", "zeros", "whole", "followers"):
        assert getattr(part, name) is getattr(state, name), name
    assert part.specs is seen and not part.moved
    assert part.waiting == {kernel: []} and part.root_of == {kernel.handle: kernel}
    assert part.result is not state.result and not part.result.decisions
    assert not state.part(seen, []).waiting


def test_what_is_open_has_no_spec_yet():
    build = ByHand()
    x, handle = build.fed("x", 4, 6), build.variable("kernel", 6, 8)
    y = build.product(x, build.read(handle))
    state = begun(build.prepared(y), PAIR, {}, ["S(0)"])
    assert state.is_open(handle) and state.specs[handle] is FREE
    assert not state.is_open(x) and state.spec(x) == ROWS
    assert not state.is_open(y), "it is not made yet"


def test_anchors_are_found_by_name():
    build = ByHand()
    x = build.fed("x", 4, 6)
    y = build.unary("Relu", x)
    prepared = build.prepared(y)
    assert begun(prepared, PAIR).anchor_of(y) is None
    state = begun(prepared, PAIR, tensors={y: "S(0)"})
    assert state.anchor_of(y) == ROWS and state.anchor_of(x) is None


def test_an_op_must_not_split_along_the_axes_it_is_named_with():
    build = ByHand()
    x = build.unary("Relu", build.fed("x", 4, 6))
    y = build.unary("Relu", x)
    state = begun(build.prepared(y), PAIR, whole=frozenset({(x.op, 1), (x.op, 0), (y.op, 1)}))
    assert state.whole_axes(x.op) == (0, 1) and state.whole_axes(y.op) == (1,)
    assert begun(state.prepared, PAIR).whole_axes(x.op) == ()


def test_zeros_and_new_lists_are_loose():
    build = ByHand()
    x, zeros = build.fed("x", 4, 6), build.const([0.0, 0.0])
    ones = build.const([1.0, 1.0])
    state = begun(build.prepared(x), PAIR, zeros=frozenset({x}))
    assert state.is_loose(zeros) and state.is_loose(x)
    assert not state.is_loose(ones)
