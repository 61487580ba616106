"""Where variables lie before the first op, and what waits for its first reader."""

from tests.propagation.by_hand import GRID, PAIR, ByHand, begun, passed, specs
from tfpar.propagation.decide import FREE
from tfpar.propagation.roots import draw_with_spec, find_root, root_spec
from tfpar.spec import parse_spec


def slotted():
    """A weight with a slot that it is added to, and a counter that nothing ties to it."""
    build = ByHand()
    weight, slot = build.variable("w", 6, 8), build.variable("w/slot", 6, 8, trainable=False)
    build.variable("count", trainable=False)
    build.update(slot, build.binary("AddV2", build.read(slot), build.read(weight)))
    return build.prepared(), weight, slot


def laid(state):
    return {v.name: state.specs[v.handle] for v in state.prepared.graph.variables}


def test_slots_lie_as_the_weight_that_a_plan_lays():
    prepared, _, _ = slotted()
    rows, whole = specs("S(0)", "R")
    state = begun(prepared, PAIR, {"w": "S(0)"})
    assert laid(state) == {"w": rows, "w/slot": rows, "count": whole}
    assert not state.waiting


def test_a_slot_that_the_plan_lays_follows_nothing():
    prepared, _, _ = slotted()
    state = begun(prepared, PAIR, {"w": "R", "w/slot": "S(1)"})
    assert laid(state) == dict(zip(("w", "w/slot", "count"), specs("R", "S(1)", "R"), strict=True))
    assert not state.followers


def test_shards_that_divide_nothing_are_dropped():
    build = ByHand()
    handle = build.variable("w", 1, 8)
    state = begun(build.prepared(), GRID, {"w": "S(0),S(1)"})
    assert state.specs[handle] == parse_spec("R,S(1)")


def test_what_the_plan_leaves_open_waits_with_what_follows_it():
    prepared, weight, slot = slotted()
    state = begun(prepared, PAIR)
    opened = prepared.graph.variables[0]
    assert state.specs[weight] is FREE and state.specs[slot] is FREE
    assert state.waiting == {opened: []}
    assert state.root_of == {weight: opened, slot: opened}


def test_reads_and_transposes_of_an_open_weight_wait_with_it():
    build = ByHand()
    handle = build.variable("w", 6, 8)
    read = build.read(handle)
    turned = build.transpose(read, (1, 0))
    y = build.product(build.fed("x", 4, 8), turned)
    state = begun(build.prepared(y), PAIR)
    (weight,) = state.prepared.graph.variables
    for made in (read, turned):
        assert find_root(state, made.op) is weight
        state.root_of[made], state.specs[made] = weight, FREE
    assert find_root(state, y.op) is None, "a product is a reader"


def test_an_anchored_tensor_does_not_wait():
    build = ByHand()
    read = build.weight("w", 6, 8)
    state = begun(build.prepared(read), PAIR, tensors={read: "S(0)"})
    assert find_root(state, read.op) is None


def test_draws_wait_with_what_scales_them_but_not_in_a_body():
    build = ByHand()
    drawn = build.draw(8, 4)
    scaled = build.binary("Mul", drawn, build.const(2.0, "float32"))
    added = build.binary("AddV2", drawn, build.fed("x", 8, 4))
    prepared = build.prepared(scaled, added)
    state = begun(prepared, PAIR)
    for op in prepared.graph.ops:
        if op is drawn.op:
            break
        for tensor in op.outputs:
            state.specs.setdefault(tensor, state.replicated)
    assert find_root(state, drawn.op) is drawn.op
    assert find_root(begun(prepared, PAIR, confined=True), drawn.op) is None
    state.root_of[drawn], state.specs[drawn] = drawn.op, FREE
    state.specs[scaled.op.inputs[1]] = state.replicated
    assert find_root(state, scaled.op) is drawn.op
    assert find_root(state, added.op) is None, "what it is added to says how it comes"


def test_the_root_is_laid_as_its_reader_wants_what_came_of_it():
    build = ByHand()
    handle = build.variable("w", 6, 8)
    turned = build.transpose(build.read(handle), (1, 0))
    y = build.product(build.fed("x", 4, 8), turned)
    state = begun(build.prepared(y), GRID)
    (weight,) = state.prepared.graph.variables
    for tensor in (turned.op.inputs[0], turned):
        state.root_of[tensor] = weight
    assert root_spec(state, turned, parse_spec("S(0),S(1)")) == (weight, parse_spec("S(1),S(0)"))
    assert root_spec(state, turned, parse_spec("R,P(sum)")) == (weight, parse_spec("R,R"))


def test_a_reader_of_a_slot_speaks_for_the_weight():
    prepared, _, slot = slotted()
    state = begun(prepared, PAIR)
    assert root_spec(state, slot, parse_spec("S(1)"))[1] == parse_spec("S(1)")


def test_a_draw_comes_as_it_is_wanted_where_its_rule_allows():
    build = ByHand()
    drawn = build.draw(8, 4)
    state = begun(build.prepared(drawn), PAIR)
    rows, columns, whole = specs("S(0)", "S(1)", "R")
    assert draw_with_spec(state, drawn.op, rows).strategy.out_specs == (rows,)
    assert draw_with_spec(state, drawn.op, columns).strategy.out_specs == (whole,)


def test_in_a_pass_the_first_reader_lays_weight_slot_and_draw():
    build = ByHand()
    weight, slot = build.variable("w", 6, 8), build.variable("w/slot", 6, 8, trainable=False)
    y = build.product(build.fed("x", 4, 6), build.read(weight))
    masked = build.binary("Mul", y, build.draw(4, 8))
    build.update(slot, build.binary("AddV2", build.read(slot), build.read(weight)))
    state = passed(build.prepared(masked), PAIR, {}, ["S(1)"])
    assert state.specs[weight] == state.specs[slot] == parse_spec("S(0)")
    assert not state.waiting
