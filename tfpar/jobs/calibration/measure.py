"""Measurement of a cluster: times its parts in order, and describes the result."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from tfpar.cluster.description import Cluster, Device, Level, MeasuredCollective, Node, slowest_of
from tfpar.jobs.calibration import fit
from tfpar.jobs.calibration.devices import devices_of
from tfpar.jobs.calibration.links import collectives_of, links_of, transfers_of, with_waits
from tfpar.jobs.calibration.programs import Chains, collective, operand_of, product
from tfpar.jobs.calibration.timing import Timer
from tfpar.jobs.calibration.workload import ALIKE, MachineInfo, Sizes, Tell
from tfpar.spec import Mesh

_COMPUTE, _COLLECTIVES, _WAITS = 0.35, 0.7, 0.9  # of the budget: where these end
# What products and collectives take that run side by side: where cores are granted by quota, a
# rank is idle for a part of anything shorter. And how many of each at most: compiling takes time.
_BESIDE_S, _MOST_BESIDE = 0.1, 500


def measure(mesh: Mesh, machine: MachineInfo, timer: Timer, sizes: Sizes, tell: Tell) -> Cluster:
    """The cluster of the ranks that `timer` runs on."""
    everyone, budget_s = Mesh.of([mesh.size]), timer.left_s
    tell("the start of a step")
    timer.measure_step(Chains(everyone).program())
    devices = devices_of(everyone, machine, timer, sizes, (1 - _COMPUTE) * budget_s, tell)
    left_s = (1 - _COLLECTIVES) * budget_s
    found = collectives_of(mesh, timer, sizes, left_s, tell)
    if not machine.one_memory:  # there, collectives are ops as others are
        tell("what ranks wait")
        found = with_waits(found, timer, sizes, (1 - _WAITS) * budget_s)
    sent: list[MeasuredCollective] = []
    links: list[float] = []
    if not machine.one_memory:
        tell("transfers")
        links = links_of(machine.nodes, mesh.size, timer)
        sent = transfers_of(machine.nodes, mesh.size, timer)
    overlap = 0.0  # where ranks are the same cores, what collectives take is not there for ops
    if found and not machine.one_memory:
        tell("overlap")
        overlap = _overlap(everyone, timer, slowest_of(devices), found, sizes)
    levels = _levels(machine.nodes, mesh.size, found, links)
    outside = levels[: machine.nodes > 1]
    return Cluster(
        "calibrated",
        tuple(_nodes(devices, links, levels[len(outside) :], machine.host_memory_bytes)),
        tuple(outside),
        overlap=overlap,
        algorithms=("ring",),
        measured=(*found, *sent),
        step_s=timer.step_s,
        one_memory=machine.one_memory,
    )


def _nodes(
    devices: Sequence[Device],
    links: Sequence[float],
    levels: Sequence[Level],
    host_memory_bytes: float | None = None,
) -> Iterator[Node]:
    """Describe the machines; consecutive ones of equal speed are one machine type.

    Args:
        devices: of each machine.
        links: bytes/s of each machine; none if there is one.
        levels: within them.
        host_memory_bytes: of each.
    """
    most = max(links, default=0.0)
    slower = [link if link * ALIKE < most else None for link in links] or [None] * len(devices)
    for (device, uplink), alike in itertools.groupby(zip(devices, slower, strict=True)):
        yield Node(device, tuple(levels), len([*alike]), uplink, host_memory_bytes)


def _overlap(
    mesh: Mesh, timer: Timer, device: Device, found: Sequence[MeasuredCollective], sizes: Sizes
) -> float:
    """Measure the part of products that goes on beside all-reduces of all ranks."""
    share_s = timer.left_s / 3
    side, payload = sizes.half_side, sizes.payloads[-2]
    whole = next(m for m in found if m.kind == "all_reduce" and m.mesh[m.axis] == mesh.size)
    reduce_s = whole.startup_s + payload / whole.bandwidth
    product_s = device.launch_s + 2.0 * side**3 / device.flops["float32"]
    products, reduces = (
        min(math.ceil(_BESIDE_S / seconds), _MOST_BESIDE) for seconds in (product_s, reduce_s)
    )
    shape, _ = operand_of("all_reduce", mesh.size, payload)

    def beside(products: int, reduces: int) -> float:
        chains = Chains(mesh)
        if products:
            chains.add(product, [(side, side)] * 2, "float32", products)
        if reduces:
            chains.add(collective("all_reduce", mesh, (0,)), [shape], "float32", reduces)
        return timer.whole(chains.program(), share_s)

    return fit.overlap(beside(products, 0), beside(0, reduces), beside(products, reduces))


def _levels(
    nodes: int, size: int, found: Sequence[MeasuredCollective], links: Sequence[float]
) -> list[Level]:
    """Links between nodes as the fastest of them has, and links within nodes with which rings take
    as long as the all-reduces did; from outside in."""
    reduces = {
        Mesh.of(m.mesh).groups((m.axis,)): m
        for m in found
        if m.kind == "all_reduce" and not m.group
    }
    each = size // nodes
    grid = Mesh.of([nodes, each])
    levels = []
    for axis, count in enumerate(grid.shape):
        if count > 1:
            whole, rounds = reduces[grid.groups((axis,))], 2 * (count - 1)
            own = rounds / count * whole.bandwidth if axis else max(links)
            levels.append(Level(count, own, whole.startup_s / rounds))
    return levels
