"""Checks of collectives, which every rank runs."""

from __future__ import annotations

import pathlib

import numpy as np
import tensorflow as tf

from tests.tf.distributed.transport_kit import (
    DTYPES,
    GROUPS_OF_4,
    Group,
    Rank,
    after,
    own,
    reduced,
    reductions_of,
    same,
    total,
    value,
)
from tfpar.ir import DType
from tfpar.spec import TfparError
from tfpar.tf.runtime.backends.wire import Wire, WireOperand
from tfpar.tf.runtime.function_def import (
    FunctionWriter,
    serialize_attrs,
)

# --- checks of single collectives ---------------------------------------------------------------


def all_reduce_takes_every_dtype_and_reduction(rank: Rank) -> None:
    cases = [(dtype, reduction) for dtype in DTYPES for reduction in reductions_of(dtype)]

    def body(wire: Wire, edges: list[str]) -> list[tuple[str, str]]:
        return [
            (wire.all_reduce(f"{d}_{r}", [edge], d, r, rank.everyone)[0], d)
            for edge, (d, r) in zip(edges, cases, strict=True)
        ]

    values = [[value(r, (2, 3), dtype) for r in rank.everyone] for dtype, _ in cases]
    results = rank.function([dtype for dtype, _ in cases], body)(own(rank, values))
    for got, case, parts in zip(results, cases, values, strict=True):
        same(got, reduced(parts, case[1]), case)


def all_reduce_carries_several_tensors_of_any_shape(rank: Rank) -> None:
    shapes: list[tuple[int, ...]] = [(3,), (2, 5), (), (1, 1, 4), (7, 1)]
    for dtype, reduction in (("float32", "sum"), ("int64", "max"), ("bfloat16", "min")):

        def body(
            wire: Wire, edges: list[str], dtype: str = dtype, reduction: str = reduction
        ) -> list[tuple[str, str]]:
            done = wire.all_reduce("several", edges, dtype, reduction, rank.everyone)
            return [(edge, dtype) for edge in done]

        values = [[value(r, shape, dtype) for r in rank.everyone] for shape in shapes]
        results = rank.function([dtype] * len(shapes), body)(own(rank, values))
        for got, shape, parts in zip(results, shapes, values, strict=True):
            same(got, reduced(parts, reduction), (dtype, reduction, shape))


def all_gather_joins_every_dtype_along_any_dim(rank: Rank) -> None:
    cases = [(dtype, dim) for dtype in DTYPES for dim in range(3)]

    def body(wire: Wire, edges: list[str]) -> list[tuple[str, str]]:
        return [
            (wire.all_gather(f"{dtype}_{dim}", edge, dtype, dim, rank.everyone), dtype)
            for edge, (dtype, dim) in zip(edges, cases, strict=True)
        ]

    values = [[value(r, (2, 3, 2), dtype) for r in rank.everyone] for dtype, _ in cases]
    results = rank.function([dtype for dtype, _ in cases], body)(own(rank, values))
    for got, case, parts in zip(results, cases, values, strict=True):
        same(got, np.concatenate(parts, case[1]), case)


def reduce_scatter_gives_each_rank_its_block_along_any_dim(rank: Rank) -> None:
    cases = [(d, r, dim) for d in DTYPES for r in reductions_of(d) for dim in range(2)]
    shape = (2 * rank.size, rank.size)

    def body(wire: Wire, edges: list[str]) -> list[tuple[str, str]]:
        return [
            (wire.reduce_scatter(f"{d}_{r}_{dim}", edge, d, r, dim, rank.everyone), d)
            for edge, (d, r, dim) in zip(edges, cases, strict=True)
        ]

    values = [[value(r, shape, dtype) for r in rank.everyone] for dtype, _, _ in cases]
    results = rank.function([dtype for dtype, _, _ in cases], body)(own(rank, values))
    for got, case, parts in zip(results, cases, values, strict=True):
        whole = reduced(parts, case[1])
        same(got, np.split(whole, rank.size, case[2])[rank.rank], case)


def several_operands_travel_as_one(rank: Rank) -> None:
    """Of other shapes and along other dims: to the bit what each gets by itself."""
    n = rank.size
    shapes, dims, others = [(2 * n, n), (n, 3 * n), (n, 5, n)], (0, 1, 2), (1, 0, 0)
    dtypes = ("float32", "bfloat16", "bool", "complex64", "int64")

    def body(wire: Wire, edges: list[str]) -> list[tuple[str, str]]:
        found = []
        for at, dtype in enumerate(dtypes):
            own = edges[at * len(shapes) : (at + 1) * len(shapes)]
            operands = [WireOperand(e, shape) for e, shape in zip(own, shapes, strict=True)]
            reduction, everyone = reductions_of(dtype)[0], rank.everyone
            found += [
                *wire.all_gathers(f"gather_{dtype}", operands, dtype, dims, everyone),
                *wire.reduce_scatters(
                    f"scatter_{dtype}", operands, dtype, reduction, dims, everyone
                ),
                *wire.all_to_alls(f"exchange_{dtype}", operands, dtype, dims, others, everyone),
            ]
            for i, operand in enumerate(operands):
                name, edge = f"{dtype}_{i}", operand.edge
                found += [
                    wire.all_gather(f"gather_{name}", edge, dtype, dims[i], everyone),
                    wire.reduce_scatter(
                        f"scatter_{name}", edge, dtype, reduction, dims[i], everyone
                    ),
                    wire.all_to_all(f"exchange_{name}", edge, dtype, dims[i], others[i], everyone),
                ]
        each = 6 * len(shapes)
        return [(edge, dtypes[i // each]) for i, edge in enumerate(found)]

    given = [value(rank.rank, shape, d, salt) for d in dtypes for salt, shape in enumerate(shapes)]
    results = rank.function([d for d in dtypes for _ in shapes], body)(
        [tf.constant(v) for v in given]
    )
    count = len(shapes)
    for at in range(0, len(results), 6 * count):
        together, alone = results[at : at + 3 * count], results[at + 3 * count : at + 6 * count]
        for kind in range(3):
            for i in range(count):
                wanted = alone[3 * i + kind].numpy()
                same(together[kind * count + i], wanted, (dtypes[at // (6 * count)], kind, i))


def all_to_all_moves_blocks_between_any_two_dims(rank: Rank) -> None:
    cases = [(d, split, join) for d in DTYPES for split in range(2) for join in range(2)]
    shape = (2 * rank.size, rank.size, 3)

    def body(wire: Wire, edges: list[str]) -> list[tuple[str, str]]:
        return [
            (wire.all_to_all(f"{d}_{split}{join}", edge, d, split, join, rank.everyone), d)
            for edge, (d, split, join) in zip(edges, cases, strict=True)
        ]

    values = [[value(r, shape, dtype) for r in rank.everyone] for dtype, _, _ in cases]
    results = rank.function([dtype for dtype, _, _ in cases], body)(own(rank, values))
    for got, (dtype, split, join), parts in zip(results, cases, values, strict=True):
        blocks = [np.split(part, rank.size, split)[rank.rank] for part in parts]
        same(got, np.concatenate(blocks, join), (dtype, split, join))


def broadcast_brings_every_dtype_from_the_first_rank(rank: Rank) -> None:
    def body(wire: Wire, edges: list[str]) -> list[tuple[str, str]]:
        pairs = zip(edges, DTYPES, strict=True)
        return [(wire.broadcast(d, edge, d, rank.everyone), d) for edge, d in pairs]

    values = [[value(r, (2, 3), dtype) for r in rank.everyone] for dtype in DTYPES]
    results = rank.function(DTYPES, body)(own(rank, values))
    for got, dtype, parts in zip(results, DTYPES, values, strict=True):
        same(got, parts[0], dtype)


def extreme_values_arrive_as_they_are(rank: Rank) -> None:
    extremes = [_extremes(dtype) for dtype in DTYPES]

    def body(wire: Wire, edges: list[str]) -> list[tuple[str, str]]:
        pairs = zip(edges, DTYPES, strict=True)
        return [(wire.all_gather(d, edge, d, 0, rank.everyone), d) for edge, d in pairs]

    results = rank.function(DTYPES, body)([tf.constant(e) for e in extremes])
    for got, sent in zip(results, extremes, strict=True):
        same(got, np.concatenate([sent] * rank.size), sent.dtype)


def _extremes(dtype: str) -> np.ndarray:
    kind = tf.as_dtype(dtype)
    numbers = (
        [False, True]
        if dtype == "bool"
        else [1j, -2.5]
        if kind.is_complex
        else [kind.min, kind.max]
    )
    return np.array(numbers, kind.as_numpy_dtype)


def empty_tensors_pass(rank: Rank) -> None:
    def body(wire: Wire, edges: list[str]) -> list[tuple[str, str]]:
        several = wire.all_reduce("several", edges, "float32", "sum", rank.everyone)
        return [(s, "float32") for s in several] + _all_five(wire, "e", edges[0], rank.everyone)

    results = rank.function(["float32"] * 2, body)([tf.zeros([0, 3]), tf.ones([2])])
    assert [r.shape.as_list() for r in results] == [[0, 3], [2], *[[0, 3]] * 5]
    same(results[1], np.full(2, rank.size, np.float32), "beside an empty one")


def what_cannot_be_reduced_is_refused(rank: Rank) -> None:
    for dtype, reduction in (("complex64", "max"), ("uint64", "min")):
        wire = Wire(FunctionWriter("refused"), rank.transport)
        try:
            wire.all_reduce("refused", ["in0"], dtype, reduction, rank.everyone)
        except TfparError as error:
            assert reduction in str(error) and dtype in str(error), error
        else:
            raise AssertionError((dtype, reduction))


# --- checks of many collectives ------------------------------------------------------------------


def groups_do_not_disturb_each_other(rank: Rank) -> None:
    rank.transport.connect(GROUPS_OF_4)
    groups = [g for g in GROUPS_OF_4 if rank.rank in g] + [rank.everyone]
    wanted, given = [], []
    for i, group in enumerate(groups):
        parts = [value(r, (4, 4), "float32", i) for r in group]
        blocks = [np.split(part, len(group))[group.index(rank.rank)] for part in parts]
        given.append(tf.constant(parts[group.index(rank.rank)]))
        wanted += [
            total(parts),
            np.concatenate(parts),
            total(blocks),
            np.concatenate(blocks),
            parts[0],
        ]

    def body(wire: Wire, edges: list[str]) -> list[tuple[str, str]]:
        pairs = enumerate(zip(edges, groups, strict=True))
        return [edge for i, (e, group) in pairs for edge in _all_five(wire, f"g{i}", e, group)]

    function = rank.function(["float32"] * len(groups), body)
    for _ in range(3):
        for i, (got, expected) in enumerate(zip(function(given), wanted, strict=True)):
            same(got, expected, (groups[i // 5], i % 5))


def _all_five(wire: Wire, name: str, edge: str, group: Group) -> list[tuple[str, str]]:
    dtype = "float32"
    results = [
        *wire.all_reduce(f"{name}/all_reduce", [edge], dtype, "sum", group),
        wire.all_gather(f"{name}/all_gather", edge, dtype, 0, group),
        wire.reduce_scatter(f"{name}/reduce_scatter", edge, dtype, "sum", 0, group),
        wire.all_to_all(f"{name}/all_to_all", edge, dtype, 0, 0, group),
        wire.broadcast(f"{name}/broadcast", edge, dtype, group),
    ]
    return [(result, dtype) for result in results]


def collectives_may_become_ready_in_any_order(rank: Rank) -> None:
    """Each waits for a product of matrices, which are large for the first or the last of them."""
    count = 12

    def body(wire: Wire, edges: list[str]) -> list[tuple[str, str]]:
        delayed = [after(wire, f"late{i}", edges[i], edges[count + i], rank) for i in range(count)]
        return [
            (wire.all_reduce(f"sum{i}", [edge], "float32", "sum", rank.everyone)[0], "float32")
            if i % 2
            else (wire.all_gather(f"all{i}", edge, "float32", 0, rank.everyone), "float32")
            for i, edge in enumerate(delayed)
        ]

    values = [[value(r, (2, 3), "float32", i) for r in rank.everyone] for i in range(count)]
    places = range(count) if rank.rank % 2 else reversed(range(count))
    matrices = [tf.ones([1 + 40 * i, 1 + 40 * i]) for i in places]
    function = rank.function(["float32"] * (2 * count), body)
    for _ in range(5):
        results = function([*own(rank, values), *matrices])
        for i, (got, parts) in enumerate(zip(results, values, strict=True)):
            same(got, total(parts) if i % 2 else np.concatenate(parts), i)


def arguments_may_differ_between_ranks(rank: Rank) -> None:
    def body(wire: Wire, edges: list[str]) -> list[tuple[str, str]]:
        attrs = serialize_attrs({"T": DType("float32")})
        wire._writer.node("masked", "Mul", edges, attrs, rank.transport.device)
        edge = "masked:z:0"
        return [(wire.all_reduce("sum", [edge], "float32", "sum", rank.everyone)[0], "float32")]

    masks = [np.float32(r != 0) for r in rank.everyone]
    values = [value(r, (2, 3), "float32") for r in rank.everyone]
    (got,) = rank.function(["float32"] * 2, body)(own(rank, [values, masks]))
    same(got, total(values[1:]), "masked sum")


def a_function_runs_again_on_other_values(rank: Rank) -> None:
    def body(wire: Wire, edges: list[str]) -> list[tuple[str, str]]:
        return _all_five(wire, "again", edges[0], rank.everyone)

    function = rank.function(["float32"], body)
    for i in range(24):
        parts = [value(r, (2 * rank.size, 3), "float32", i) for r in rank.everyone]
        blocks = [np.split(part, rank.size)[rank.rank] for part in parts]
        wanted = [
            total(parts),
            np.concatenate(parts),
            total(blocks),
            np.concatenate(blocks),
            parts[0],
        ]
        results = function([tf.constant(parts[rank.rank])])
        for got, expected, kind in zip(results, wanted, range(5), strict=True):
            same(got, expected, (i, kind))


def calls_of_a_step_leave_no_threads_behind(rank: Rank) -> None:
    """Jobs of many quick steps ran out of threads: each call of a collective kept two for long."""

    def body(wire: Wire, edges: list[str]) -> list[tuple[str, str]]:
        names = [f"many{i}" for i in range(8)]
        group = rank.everyone
        return [(wire.all_reduce(n, edges, "float32", "sum", group)[0], "float32") for n in names]

    function, argument = rank.function(["float32"], body), tf.ones([3])
    for _ in range(3):
        function([argument])
    before = _threads()
    for _ in range(10):
        function([argument])
    grown = _threads() - before
    assert grown < 20, f"{grown} more threads after 80 collectives"


def _threads() -> int:
    status = pathlib.Path("/proc/self/status").read_text()
    (count,) = (line.split()[1] for line in status.splitlines() if line.startswith("Threads:"))
    return int(count)


def large_tensors_arrive_whole(rank: Rank) -> None:
    shape = (2048, 1024 if rank.size == 2 else 128)  # 8 MB, 1 MB

    def body(wire: Wire, edges: list[str]) -> list[tuple[str, str]]:
        sums = wire.all_reduce("sums", edges, "float32", "sum", rank.everyone)
        return [(s, "float32") for s in sums] + _all_five(wire, "one", edges[0], rank.everyone)

    parts = [np.full(shape, r + 1, np.float32) + np.arange(shape[1]) for r in rank.everyone]
    parts = [part.astype(np.float32) for part in parts]
    blocks = [np.split(part, rank.size)[rank.rank] for part in parts]
    wanted = [
        total(parts),
        total(parts)[:3],
        total(parts),
        np.concatenate(parts),
        total(blocks),
        np.concatenate(blocks),
        parts[0],
    ]
    given = [tf.constant(parts[rank.rank]), tf.constant(parts[rank.rank][:3])]
    results = rank.function(["float32"] * 2, body)(given)
    for i, (got, expected) in enumerate(zip(results, wanted, strict=True)):
        same(got, expected, i)
