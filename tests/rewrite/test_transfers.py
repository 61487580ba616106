"""Sends and receives as ops of local programs."""

import pytest

from tfpar.compile.local.local_graph import LocalProgram
from tfpar.compile.local.packing import payload
from tfpar.compile.local.transfers import (
    Channel,
    ChannelEnd,
    channels_of,
    ends_of,
    match_channels,
    recv,
    send,
)
from tfpar.ir import GraphBuilder, Tensor
from tfpar.spec import Mesh, RuntimeMismatchError, TfparError


def source(build: GraphBuilder, shape=(2, 3), dtype="float32") -> Tensor:
    return build.one("Placeholder", (), shape, dtype)


def test_a_send_is_an_effect_and_reads_its_operand():
    build = GraphBuilder(name="stage")
    x = source(build)
    op = send(build, x, "stage/x", [2, None])
    assert op.inputs == [x] and op.outputs == [] and build.graph.effects == [op]
    assert op.name == "stage/Send"


def test_a_received_tensor_has_a_shape_and_a_dtype():
    build = GraphBuilder(name="stage")
    tensor = recv(build, [4], "bfloat16", "stage/x", [0, 1])
    assert (tensor.shape, tensor.dtype) == ((4,), "bfloat16")
    assert build.graph.effects == []  # one that nobody reads is left out, as any op


def test_both_ends_count_the_bytes_of_the_tensor():
    build = GraphBuilder()
    sent = send(build, source(build, (2, 3), "bfloat16"), "x", [1])
    received = recv(build, (2, 3), "bfloat16", "x", [0]).op
    assert payload(sent) == payload(received) == 12


def test_both_ends_name_one_channel():
    build = GraphBuilder()
    sent = send(build, source(build), "x", [2, None])
    received = recv(build, (2, 3), "float32", "x", [0]).op
    assert channels_of(sent, (0, 1)) == [Channel(0, 2, "x"), None]
    assert channels_of(received, (2,)) == [Channel(0, 2, "x")]
    program = LocalProgram(build.graph, Mesh.of([2]), [], [], [], {})
    assert ends_of(program, (0, 1), "Send") == [ChannelEnd(0, 2, "x", "op/Send", (2, 3), "float32")]


def test_channels_have_names_of_their_own():
    channels = [Channel(0, 1, "x"), Channel(1, 0, "x"), Channel(0, 1, "y"), Channel(0, 11, "x")]
    assert len({c.name for c in channels}) == 4


def end(source: int, target: int, op: str, shape=(2, 3), dtype="float32") -> ChannelEnd:
    return ChannelEnd(source, target, "h", op, shape, dtype)


def test_what_is_sent_is_received():
    sends, receives = (
        [end(0, 2, op), end(1, 3, op), end(2, 0, op, (), "bool")] for op in ("a", "b")
    )
    channels = [Channel(0, 2, "h"), Channel(1, 3, "h"), Channel(2, 0, "h")]
    assert match_channels(sends, receives[::-1]) == channels


@pytest.mark.parametrize(
    ("sends", "receives", "message"),
    [
        ([end(0, 1, "a")], [], r"Rank 0 sends 'h', float32\[2, 3\] \(op 'a'\), to rank 1, which d"),
        ([], [end(0, 1, "b")], r"Rank 1 receives 'h', float32\[2, 3\] \(op 'b'\), from rank 0, wh"),
        ([end(0, 1, "a")], [end(1, 0, "b")], "Rank 0 sends 'h'"),
        (
            [end(0, 1, "a")],
            [end(0, 1, "b", (3, 2))],
            r"float32\[2, 3\] \(op 'a'\); rank 1 receives it as float32\[3, 2\] \(op 'b'\)",
        ),
        ([end(0, 1, "a")], [end(0, 1, "b", dtype="bool")], r"receives it as bool\[2, 3\]"),
        ([end(0, 1, "a"), end(0, 1, "c")], [], "sent twice .*: by ops 'a' and 'c'"),
        ([], [end(0, 1, "a"), end(0, 1, "c")], "received twice .*: by ops 'a' and 'c'"),
    ],
)
def test_ends_that_do_not_match_are_named(sends, receives, message):
    with pytest.raises(RuntimeMismatchError, match=message):
        match_channels(sends, receives)


@pytest.mark.parametrize("key", ["", "x:0", "/x", "a b"])
def test_a_key_is_spelled_as_an_op(key):
    build = GraphBuilder()
    with pytest.raises(TfparError, match="is not spelled as an op's name"):
        recv(build, (2,), "float32", key, [0])


def test_what_is_sent_has_a_known_shape():
    build = GraphBuilder()
    with pytest.raises(TfparError, match="'x' has the shape .*every size must be known"):
        send(build, source(build, (None, 3)), "x", [1])
