"""What strategies see: specs settled by now, and those that follow from a weight's."""

import types

from tests.propagation.by_hand import PAIR, ByHand
from tfpar.propagation.view import known_spec, settled_spec
from tfpar.spec import Mesh, parse_spec


def view(prepared, specs, mesh=PAIR, anchors=None):
    """The least that is a `View`."""
    laid = {tensor: None if text is None else parse_spec(text) for tensor, text in specs.items()}
    named = {tensor: parse_spec(text) for tensor, text in (anchors or {}).items()}
    return types.SimpleNamespace(
        prepared=prepared, mesh=mesh, specs=laid, anchor_of=lambda tensor: named.get(tensor)
    )


def test_a_read_lies_as_its_variable():
    build = ByHand()
    handle = build.variable("w", 6, 8)
    read = build.read(handle)
    turned = build.transpose(read, (1, 0))
    prepared = build.prepared(turned)
    assert settled_spec(view(prepared, {handle: "S(0)"}), read) == parse_spec("S(0)")
    assert settled_spec(view(prepared, {handle: "S(0)", read: "R"}), read) == parse_spec("R")
    assert settled_spec(view(prepared, {handle: None}), read) is None
    assert settled_spec(view(prepared, {handle: "S(0)"}), turned) is None


def test_what_holds_a_weight_lies_as_the_weight_does():
    build = ByHand()
    handle = build.variable("w", 6, 8)
    turned = build.transpose(build.read(handle), (1, 0))
    doubled = build.binary("AddV2", turned, turned)
    prepared = build.prepared(doubled)
    assert known_spec(view(prepared, {handle: "S(0)"}), turned) == parse_spec("S(1)")
    assert known_spec(view(prepared, {handle: "R"}), turned) == parse_spec("R")
    assert known_spec(view(prepared, {handle: None}), turned) is None
    assert known_spec(view(prepared, {handle: "S(0)"}), doubled) is None, "it is a sum"


def test_what_is_remembered_is_that_of_the_mesh():
    build = ByHand()
    handle = build.variable("w", 8, 2)
    flat = build.reshape(build.read(handle), (16,))
    prepared = build.prepared(flat)
    for ranks, expected in ((2, "S(0)"), (4, "S(0)")):
        seen = view(prepared, {handle: "S(0)"}, Mesh.of([ranks]))
        assert known_spec(seen, flat) == parse_spec(expected)
        assert known_spec(seen, flat) is known_spec(seen, flat)
    assert {sizes for sizes, _, _ in prepared.caches.known_specs} == {(2,), (4,)}
