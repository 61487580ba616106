"""Checks of what ranks send each other, which every rank runs."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tests.tf.distributed.transport_kit import COMPLEX, DTYPES, Rank, after, own, same, total, value
from tfpar.compile.local import Channel
from tfpar.ir import DType
from tfpar.tf.runtime.backends.wire import Wire, WireOperand
from tfpar.tf.runtime.function_def import (
    serialize_attrs,
)


def ring(rank: Rank, keys: Sequence[str]) -> tuple[list[Channel], list[Channel]]:
    """Channels to the next rank and from the one before, of those that all ranks now have."""
    n = rank.size
    channels = [Channel(r, (r + 1) % n, key) for r in rank.everyone for key in keys]
    rank.transport.connect([], channels)
    to = [c for c in channels if c.source == rank.rank]
    return to, [c for c in channels if c.target == rank.rank]


def transfers_carry_every_dtype_and_shape(rank: Rank) -> None:
    """Around a ring, so that each rank sends before it has received."""
    cases = [(dtype, shape) for dtype in DTYPES for shape in ((2, 3), (), (0, 2))]
    cases = [(d, s) for d, s in cases if s or d not in COMPLEX]  # `value` makes none
    to, source = ring(rank, [f"{d}/{'x'.join(map(str, s))}_" for d, s in cases])

    def body(wire: Wire, edges: list[str]) -> list[tuple[str, str]]:
        sent = [
            (wire.send(WireOperand(edge, shape), dtype, channel), "")
            for edge, (dtype, shape), channel in zip(edges, cases, to, strict=True)
        ]
        return sent + [
            (wire.recv(shape, dtype, channel), dtype)
            for (dtype, shape), channel in zip(cases, source, strict=True)
        ]

    values = [[value(r, shape, dtype) for r in rank.everyone] for dtype, shape in cases]
    results = rank.function([dtype for dtype, _ in cases], body)(own(rank, values))
    for got, case, parts in zip(results, cases, values, strict=True):
        same(got, parts[rank.rank - 1], case)


def transfers_may_be_written_and_become_ready_in_any_order(rank: Rank) -> None:
    """Every other rank writes them the other way round; large products hold some of them up."""
    count = 8
    to, source = ring(rank, [f"t{i}" for i in range(count)])
    order = list(range(count))
    sending, receiving = (order, order[::-1]) if rank.rank % 2 else (order[::-1], order)

    def body(wire: Wire, edges: list[str]) -> list[tuple[str, str]]:
        results = []
        for i in sending:
            late = after(wire, f"late{i}", edges[i], edges[count + i], rank)
            results.append((wire.send(WireOperand(late, (2, 3)), "float32", to[i]), ""))
        everyone = wire.all_reduce("between", edges[:1], "float32", "sum", rank.everyone)
        received = {i: wire.recv((2, 3), "float32", source[i]) for i in receiving}
        return [*results, (everyone[0], "float32"), *((received[i], "float32") for i in order)]

    values = [[value(r, (2, 3), "float32", i) for r in rank.everyone] for i in order]
    places = order if rank.rank % 2 else order[::-1]
    matrices = [tf.ones([1 + 40 * i, 1 + 40 * i]) for i in places]
    function = rank.function(["float32"] * (2 * count), body)
    for _ in range(5):
        summed, *results = function([*own(rank, values), *matrices])
        same(summed, total(values[0]), "sum")
        for i, (got, parts) in enumerate(zip(results, values, strict=True)):
            same(got, parts[rank.rank - 1], i)


def channels_serve_one_function_after_another(rank: Rank) -> None:
    """Of other shapes and dtypes; the ones before go on with what they have."""
    functions = []
    for dtype, shape in (("float32", (4,)), ("bfloat16", (3, 2)), ("float32", (2, 2))):
        (to,), (source,) = ring(rank, ["again"])

        def body(
            wire: Wire,
            edges: list[str],
            dtype: str = dtype,
            shape: tuple[int, ...] = shape,
            ends: tuple[Channel, Channel] = (to, source),
        ) -> list[tuple[str, str]]:
            sent = wire.send(WireOperand(edges[0], shape), dtype, ends[0])
            return [(sent, ""), (wire.recv(shape, dtype, ends[1]), dtype)]

        functions.append((rank.function([dtype], body), dtype, shape))
    for i in range(3):
        for function, dtype, shape in functions:
            values = [value(r, shape, dtype, i) for r in rank.everyone]
            (got,) = function([tf.constant(values[rank.rank])])
            same(got, values[rank.rank - 1], (dtype, shape))


def transfers_wait_for_what_they_are_told_to(rank: Rank) -> None:
    """A function that sends on what it has received: a chain through all ranks and back."""
    n = rank.size
    channels = [Channel(r, (r + 1) % n, "chain") for r in rank.everyone]
    rank.transport.connect([], channels)

    def body(wire: Wire, edges: list[str]) -> list[tuple[str, str]]:
        if rank.rank == 0:
            sent = wire.send(WireOperand(edges[0], (3,)), "float32", channels[0])
            return [(sent, ""), (wire.recv((3,), "float32", channels[-1]), "float32")]
        received = wire.recv((3,), "float32", channels[rank.rank - 1])
        attrs = serialize_attrs({"T": DType("float32")})
        wire._writer.node("added", "AddV2", [received, edges[0]], attrs, rank.transport.device)
        control = [received.partition(":")[0]]
        added = WireOperand("added:z:0", (3,))
        sent = wire.send(added, "float32", channels[rank.rank], control)
        return [(sent, ""), ("added:z:0", "float32")]

    function = rank.function(["float32"], body)
    for i in range(3):
        values = [value(r, (3,), "float32", i) for r in rank.everyone]
        (got,) = function([tf.constant(values[rank.rank])])
        same(got, total(values[: rank.rank + 1] if rank.rank else values), "chain")
