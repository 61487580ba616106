"""Times of collectives and transfers, on groups of ranks and between machines."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence

from tfpar.cluster.check import TRANSFER
from tfpar.cluster.description import MeasuredCollective
from tfpar.cluster.network import Groups
from tfpar.jobs.calibration import fit
from tfpar.jobs.calibration.programs import (
    after_product,
    chain_of,
    collective,
    operand_of,
    transfer,
)
from tfpar.jobs.calibration.timing import Timer
from tfpar.jobs.calibration.workload import ALIKE, Sizes, Tell
from tfpar.planning.meshes import logical_meshes
from tfpar.spec import Mesh
from tfpar.spec.names import COLLECTIVES

Pair = tuple[str, Mesh, int]
"""A kind of collective, and the mesh axis that it runs over."""

_PACKED, _PACKED_BYTES = 4, 2_000_000  # what is reduced of such a size is gradients, packed
_WAITED = ("all_reduce", "all_gather")
_SENT = (4_000, 1_000_000)  # bytes of what goes from rank to rank
_SENT_ALONE = (4_000, 4_000_000)


def axes_to_measure(mesh: Mesh) -> list[tuple[Mesh, int]]:
    """(mesh, axis) of every group of ranks that a search on `mesh` may use, each once."""
    found: dict[Groups, tuple[Mesh, int]] = {}
    for logical in logical_meshes(mesh):
        for axis, size in enumerate(logical.mesh.shape):
            if size > 1:
                found.setdefault(logical.mesh.groups((axis,)), (logical.mesh, axis))
    return list(found.values())


def collectives_of(
    mesh: Mesh,
    timer: Timer,
    sizes: Sizes,
    reserve_s: float,
    tell: Tell,
    kinds: Sequence[str] = COLLECTIVES,
) -> list[MeasuredCollective]:
    """Measure collectives of `kinds` on all axes; if time is short, some at two sizes only."""
    pairs: list[Pair] = [(kind, *at) for at in axes_to_measure(mesh) for kind in kinds]
    first, others = sizes.payloads[:2], sizes.payloads[2:]
    tasks = [(pair, n) for some in (first, others) for n in some for pair in pairs]
    times: dict[Pair, list[tuple[int, list[float]]]] = {pair: [] for pair in pairs}
    for i, (pair, wanted) in enumerate(tasks):
        left_s = timer.left_s - reserve_s
        if left_s <= 0 and i >= len(first) * len(pairs):
            break
        kind, axes, axis = pair
        if i % len(pairs) == 0:
            tell(f"collectives of {wanted / 1e3:g} kB")
        packed = _PACKED if kind == "all_reduce" and wanted >= _PACKED_BYTES else 1
        shape, num_bytes = operand_of(kind, axes.shape[axis], wanted // packed)
        chain = chain_of(axes, collective(kind, axes, (axis,)), [shape] * packed, "float32")
        seconds = timer.by_rank(chain, max(left_s, 0.0) / (len(tasks) - i))
        times[pair].append((packed * num_bytes, seconds))
    return [
        entry
        for (kind, axes, axis), taken in times.items()
        for entry in _of_groups(kind, axes, axis, *zip(*taken, strict=True))
    ]


def with_waits(
    found: Sequence[MeasuredCollective], timer: Timer, sizes: Sizes, reserve_s: float
) -> list[MeasuredCollective]:
    """Add to the startup of collectives what their ranks wait between the ops of a step.

    There, ranks do not arrive all at once, and find cores that compute. Along each axis some
    collectives are timed between products. What such a chain takes beyond products and collectives
    by themselves is the wait; its mean becomes part of the startup.

    Along each axis some are timed between products. What such a chain takes beyond products and
    collectives by themselves is what ranks wait; the mean of it becomes part of the startup.
    """
    kinds: dict[tuple[tuple[int, ...], int], dict[str, MeasuredCollective]]
    kinds = {(m.mesh, m.axis): {} for m in found}
    for m in found:
        if m.kind in _WAITED and not m.group:
            kinds[m.mesh, m.axis][m.kind] = m
    num_tasks = len(kinds) * (1 + len(_WAITED)) * len(sizes.waited)
    wait_s = {}
    for (shape, axis), lines in kinds.items():
        mesh = Mesh.of(shape)
        extra = []
        for wanted in sizes.waited:
            allowed_s = max(timer.left_s - reserve_s, 0.0) / num_tasks
            alone: dict[tuple[int, ...], float] = {}
            for kind, line in lines.items():
                operand, num_bytes = operand_of(kind, mesh.shape[axis], wanted)
                operands = [operand, sizes.between[:2], sizes.between[1:]]
                if operand not in alone:
                    alone[operand] = timer.seconds(
                        chain_of(mesh, after_product(), operands), allowed_s
                    )
                emit = after_product(collective(kind, mesh, (axis,)))
                both = timer.seconds(chain_of(mesh, emit, operands), allowed_s)
                itself = line.startup_s + num_bytes / line.bandwidth
                extra.append(both - alone[operand] - itself)
        wait_s[shape, axis] = max(statistics.mean(extra), 0.0)
    return [dataclasses.replace(m, startup_s=m.startup_s + wait_s[m.mesh, m.axis]) for m in found]


def _of_groups(
    kind: str, mesh: Mesh, axis: int, sizes: Sequence[int], by_rank: Sequence[list[float]]
) -> Iterator[MeasuredCollective]:
    """Yield the collective along an axis as measured, for all groups together.

    If one group is slower than another, each group follows.
    """

    yield MeasuredCollective(kind, mesh.shape, axis, *_line(sizes, by_rank, range(mesh.size)))
    lines = {group: _line(sizes, by_rank, group) for group in mesh.groups((axis,))}
    paces = [start + sizes[-1] / bandwidth for start, bandwidth in lines.values()]
    if max(paces) > ALIKE * min(paces):
        for group, found in lines.items():
            yield MeasuredCollective(kind, mesh.shape, axis, *found, group)


def _line(
    sizes: Sequence[int], by_rank: Sequence[list[float]], group: Sequence[int]
) -> tuple[float, float]:
    """(seconds to start, bytes/s) of the slowest rank of a group, from times at some sizes."""
    return fit.alpha_beta(sizes, [max(times[rank] for rank in group) for times in by_rank])


def transfers_of(nodes: int, size: int, timer: Timer) -> list[MeasuredCollective]:
    """Measure transfers from rank to rank, within nodes and between them, all ranks at once."""
    grid, found = Mesh.of([nodes, size // nodes]), []
    for axis, count in enumerate(grid.shape):
        if count > 1:
            emit, allowed_s = transfer(grid.groups((axis,))), timer.left_s / (4 * len(_SENT))
            chains = [chain_of(grid, emit, [(n // 4,)], "float32") for n in _SENT]
            times = [timer.by_rank(chain, allowed_s) for chain in chains]
            found.append(
                MeasuredCollective(TRANSFER, grid.shape, axis, *_line(_SENT, times, range(size)))
            )
    return found


def links_of(nodes: int, size: int, timer: Timer) -> list[float]:
    """Bytes/s between each node and the others, with the better of the two next to it; none if
    there is one node."""
    if nodes == 1:
        return []
    mesh, each, found = Mesh.of([size]), size // nodes, [0.0] * nodes
    for first in range(2 if nodes > 2 else 1):
        pairs = neighbours(nodes, first)
        rings = [[node * each + i for node in pair] for pair in pairs for i in range(each)]
        # One transfer each, so that no pair waits for another, as the calls of a library may.
        programs = [chain_of(mesh, transfer(rings), [(n // 4,)], "float32")(1) for n in _SENT_ALONE]
        times = [timer.whole_by_rank(program, timer.left_s / 8) for program in programs]
        for pair in pairs:
            ranks = [node * each + i for node in pair for i in range(each)]
            _, bandwidth = _line(_SENT_ALONE, times, ranks)
            for node in pair:
                found[node] = max(found[node], each * bandwidth)
    return found


def neighbours(nodes: int, first: int) -> list[list[int]]:
    """Nodes in pairs that lie next to each other on a ring, from the first on; if they are odd,
    the last three together."""
    turned = [(first + i) % nodes for i in range(nodes)]
    in_pairs = nodes - nodes % 2 * 3
    pairs = [turned[i : i + 2] for i in range(0, in_pairs, 2)]
    return [*pairs, turned[in_pairs:]] if in_pairs < nodes else pairs
