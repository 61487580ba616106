"""How the readers of a tensor want it, seen ahead of them."""

import pytest

from tests.propagation.by_hand import GRID, ByHand
from tests.propagation.test_view import view
from tfpar.propagation.consumer_spec import nearest, preferred_shard
from tfpar.spec import Mesh, Replicate, Shard, parse_spec

SUM = parse_spec("P(sum)")


def updated(rows=6):
    """A gradient that updates two slots, scaled on the way to one of them."""
    build = ByHand()
    gradient = build.fed("gradient", rows, 8)
    first = build.variable("first", rows, 8, trainable=False)
    second = build.variable("second", rows, 8, trainable=False)
    scaled = build.binary("Mul", gradient, build.const(0.5, "float32"))
    build.update(first, build.binary("AddV2", build.read(first), scaled))
    build.update(second, build.binary("AddV2", build.read(second), gradient))
    return build.prepared(), gradient, first, second


@pytest.mark.parametrize(
    "first, second, wanted",
    [
        ("S(0)", "S(0)", Shard(0)),
        ("S(1)", "S(1)", Shard(1)),
        ("S(0)", "S(1)", Replicate()),
        ("S(0)", "R", Replicate()),
        ("R", "R", Replicate()),
    ],
)
def test_readers_have_to_agree(first, second, wanted):
    prepared, gradient, *slots = updated()
    seen = view(prepared, dict(zip(slots, (first, second), strict=True)))
    assert preferred_shard(seen, gradient, 0, SUM) is wanted


def test_a_shard_that_does_not_divide_is_wanted_only_where_that_is_allowed():
    prepared, gradient, *slots = updated(rows=5)
    seen = view(prepared, {slot: "S(0)" for slot in slots})
    assert preferred_shard(seen, gradient, 0, SUM) is Replicate()
    assert preferred_shard(seen, gradient, 0, SUM, even=False) is Shard(0)


def test_a_dim_that_another_axis_splits_already_is_not_wanted():
    prepared, gradient, *slots = updated()
    seen = view(prepared, {slot: "R,S(0)" for slot in slots}, GRID)
    assert preferred_shard(seen, gradient, 1, parse_spec("R,P(sum)")) is Shard(0)
    assert preferred_shard(seen, gradient, 1, parse_spec("S(0),P(sum)")) is Replicate()


def test_it_looks_no_further_than_it_is_told():
    prepared, gradient, *slots = updated()
    seen = view(prepared, {slot: "S(0)" for slot in slots})
    assert preferred_shard(seen, gradient, 0, SUM, depth=2) is Shard(0)
    assert preferred_shard(seen, gradient, 0, SUM, depth=0) is Replicate()


def test_anchors_and_what_reads_nothing():
    build = ByHand()
    x = build.fed("x", 4, 6)
    y = build.unary("Relu", x)
    total = build.reduce("Sum", build.fed("z", 4, 6), [0, 1])
    prepared = build.prepared(y, total)
    assert preferred_shard(view(prepared, {}), x, 0, SUM) is None, "nothing reads its output"
    assert preferred_shard(view(prepared, {}, anchors={y: "S(1)"}), x, 0, SUM) is Shard(1)
    assert preferred_shard(view(prepared, {}, anchors={y: "R"}), x, 0, SUM) is Replicate()
    assert preferred_shard(view(prepared, {}), prepared.graph.inputs[1], 0, SUM) is None, (
        "summed away"
    )


# --- what comes next -------------------------------------------------------------------------


def looked_up():
    """A table's rows, scaled, and the two matrices that they meet, one after the other."""
    build = ByHand()
    rows = build.fed("rows", 4, 6)
    scaled = build.unary("Relu", rows)
    up, down = build.variable("up", 6, 8), build.variable("down", 8, 6)
    hidden = build.product(scaled, build.read(up))
    return build.prepared(build.product(hidden, build.read(down))), rows, scaled, up, down


def test_the_next_matrix_that_is_split_has_the_say():
    prepared, rows, _, up, down = looked_up()
    assert nearest(view(prepared, {up: "S(0)", down: "R"}), rows, 0) is Shard(1)
    assert nearest(view(prepared, {up: "S(1)", down: "S(0)"}), rows, 0) is None, "not its dim"
    assert nearest(view(prepared, {up: "R", down: "R"}), rows, 0) is None
    assert nearest(view(prepared, {up: "R", down: "S(0)"}), rows, 0) is None


def test_an_anchor_on_the_way_has_the_say():
    prepared, rows, scaled, up, down = looked_up()
    laid = {up: "S(0)", down: "R"}
    assert nearest(view(prepared, laid, anchors={scaled: "S(0)"}), rows, 0) is Shard(0)
    assert nearest(view(prepared, laid, anchors={scaled: "R"}), rows, 0) is None


def test_what_a_tensor_reaches_is_worked_out_once_for_all_plans():
    prepared, rows, _, up, down = looked_up()
    assert not prepared.caches.reached
    nearest(view(prepared, {up: "S(0)", down: "R"}), rows, 0)
    reached = prepared.caches.reached[rows]
    nearest(view(prepared, {up: "R", down: "R"}, Mesh.of([4])), rows, 0)
    assert prepared.caches.reached[rows] is reached
