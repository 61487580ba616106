"""What is known of a graph whatever the plan."""

import numpy as np

from tests.propagation.by_hand import FLOAT, ByHand


def test_ops_of_one_signature_share_a_rule():
    build = ByHand()
    x, y = build.fed("x", 4, 6), build.fed("y", 4, 8)
    same = [build.unary("Relu", x), build.unary("Relu", x)]
    other = build.unary("Relu", y)
    rules = build.prepared(*same, other).rules
    assert rules[same[0].op] is rules[same[1].op] is not rules[other.op]


def test_known_values_are_part_of_a_signature():
    """A transposition by other dims has another rule."""
    build = ByHand()
    x = build.fed("x", 4, 4)
    turned, kept = build.transpose(x, (1, 0)), build.transpose(x, (0, 1))
    rules = build.prepared(turned, kept).rules
    assert rules[turned.op] is not rules[kept.op]


def test_an_op_without_a_rule_runs_whole_and_is_listed():
    build = ByHand()
    odd = build.one("Mystery", (build.fed("x", 4, 6),), (4, 6), "float32")
    prepared = build.prepared(odd)
    assert prepared.fallbacks == [odd.op] and not prepared.rules[odd.op].splittable
    assert not prepared.once, "every rank may run it"


def test_what_has_a_state_of_its_own_runs_once():
    build = ByHand()
    x = build.fed("x", 4, 6)
    effect = build.emit("Mystery", (x,), [((4, 6), "float32")], stateful=True)
    update = build.emit("MysteryUpdate", (build.variable("w", 4, 6), x), [], stateful=True)
    build.graph.effects += [effect, update]
    prepared = build.prepared()
    assert prepared.once == {effect}, "a variable has a shard on every rank"


def test_zeros_and_new_lists_are_found():
    build = ByHand()
    zeros, ones = build.const(np.zeros(3, np.float32)), build.const(np.ones(3, np.float32))
    count = build.const(np.int32(2))
    new = build.emit("EmptyTensorList", (build.shape_const([3]), count), [((), "variant")])
    assert {zeros, *new.outputs} <= build.prepared(zeros, ones).zeros
    assert ones not in build.prepared(zeros, ones).zeros


def test_a_weight_is_held_by_what_reads_casts_and_turns_it():
    build = ByHand()
    handle, slot = build.variable("w", 6, 8), build.variable("m", 6, 8, trainable=False)
    read = build.read(handle)
    narrow = build.cast(read, "bfloat16")
    turned = build.transpose(narrow, (1, 0))
    scaled = build.binary("Mul", read, build.const(2.0, "float32"))
    prepared = build.prepared(turned, scaled, build.read(slot))
    assert prepared.weights == {handle, read, narrow, turned}


def test_ordinary_ops_are_those_that_hang_on_rule_and_specs_alone():
    build = ByHand()
    x = build.fed("x", 4, 6)
    read = build.weight("w", 6, 8)
    made = build.product(x, read)
    drawn = build.draw(4, 8)
    attrs = {"T": FLOAT, "index_type": FLOAT}
    filled = build.one(
        "Fill", (build.shape_const([4, 8]), build.const(1.0)), (4, 8), "float32", attrs
    )
    kept = build.binary("AddV2", made, filled)
    prepared = build.prepared(kept, drawn)
    assert {read.op, made.op, kept.op} <= set(prepared.ordinary)
    assert not {drawn.op, filled.op} & set(prepared.ordinary)


def test_sparse_ops_are_those_whose_sum_is_added_to_nothing():
    build = ByHand()
    rows, ids = build.fed("rows", 4, 6), build.fed("ids", 4, dtype="int32")
    inputs, attrs = (rows, ids, build.const(np.int32(9))), {"T": FLOAT}
    alone, tied = (
        build.one("UnsortedSegmentSum", inputs, (9, 6), "float32", attrs) for _ in range(2)
    )
    total = build.binary("AddV2", tied, build.fed("y", 9, 6))
    assert build.prepared(alone, total).sparse == {alone.op}


def test_slots_are_linked_to_their_weight():
    build = ByHand()
    weight, slot = build.variable("w", 6, 8), build.variable("m", 6, 8, trainable=False)
    build.update(slot, build.binary("AddV2", build.read(slot), build.read(weight)))
    prepared = build.prepared()
    first, second = prepared.graph.variables
    assert prepared.followed == {second: (first, (0, 1))}


# --- 16-bit gradients -------------------------------------------------------------------------


def updated(extra_reader: bool = False):
    """A 16-bit gradient that is cast up and subtracted from a weight."""
    build = ByHand()
    handle = build.variable("w", 6, 8)
    gradient = build.unary("Neg", build.fed("gradient", 6, 8, dtype="bfloat16"))
    wide = build.cast(gradient, "float32")
    build.update(handle, build.binary("Sub", build.read(handle), wide))
    outputs = [build.reduce("Sum", wide, [0, 1])] if extra_reader else []
    return build.prepared(*outputs), gradient, wide


def test_a_16_bit_gradient_that_only_updates_is_moved_before_it_is_cast_up():
    prepared, gradient, wide = updated()
    assert gradient in prepared.narrow and wide not in prepared.narrow


def test_what_the_step_returns_is_no_mere_update():
    build = ByHand()
    gradient = build.unary("Neg", build.fed("gradient", 6, 8, dtype="bfloat16"))
    handle = build.variable("w", 6, 8)
    build.update(handle, build.binary("Sub", build.read(handle), build.cast(gradient, "float32")))
    assert gradient in build.prepared().narrow
    assert gradient not in build.prepared(gradient).narrow


def test_not_if_something_else_is_made_of_it():
    prepared, gradient, _ = updated(extra_reader=True)
    assert gradient not in prepared.narrow
