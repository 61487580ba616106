"""`tap.calibrate`: a cluster from measurements of its parts, one after the other."""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tfpar.cluster.description import Cluster, Device, Level, MeasuredCollective, Node, slowest_of
from tfpar.cluster.files import cluster_of, describe, write_cluster
from tfpar.jobs.calibration import fit
from tfpar.jobs.calibration.devices import devices_of
from tfpar.jobs.calibration.links import collectives_of, links_of, transfers_of, with_waits
from tfpar.jobs.calibration.programs import Chains, collective, operand_of, product
from tfpar.jobs.calibration.timing import Timer
from tfpar.jobs.calibration.workload import ALIKE, ON_CPU, ON_GPU, MachineInfo, Sizes, Tell
from tfpar.progress import reporting
from tfpar.settings import MeshLike
from tfpar.spec import Mesh, TfparError, arguments
from tfpar.tf.distributed.world import World, on_first, this_world
from tfpar.tf.interop import XlaKernels
from tfpar.tf.runtime.detect import detect_cluster, every_rank
from tfpar.tf.runtime.devices import memory_of
from tfpar.tf.runtime.ranks import Ranks
from tfpar.writable import check_writable


def calibrate(
    mesh: MeshLike | None = None,
    path: str | os.PathLike[str] | None = None,
    *,
    budget_s: float = 60.0,
) -> Cluster:
    """Measure what the ranks here reach, and describe it as a cluster to plan for.

        tap.calibrate([2, 2], "local.toml")
        with tap.auto_parallel(tap.split([2, 2]), cluster="local.toml"):
            ...

    Ops and collectives run through the backend that training uses, on all ranks at once, and
    nothing else should run beside. In a job (`tfpar run`) every rank calls it, and all get
    the same cluster.

    Args:
        mesh: the ranks, as of `auto_parallel`; by default all of the job, or the GPUs here.
            Collectives are measured on all axes that a search on it may lay.
        path: of the cluster file (TOML) to write; the first rank writes it.
        budget_s: about how many seconds it may take. Each kind of collective is measured on each
            axis even if that takes longer.

    Raises:
        ArgumentError: an argument of another type, or a budget that is not above 0.
        TfparError: more ranks than devices or processes, or a file that cannot be written.
    """
    budget_s = arguments.number("budget_s", budget_s, above=0)
    path = arguments.optional(arguments.path, "path", path)
    mesh = every_rank() if mesh is None else Mesh.of(mesh)
    world = this_world()
    if path is not None:
        check = functools.partial(check_writable, "cluster file", path, advice="Name another file.")
        on_first(world, "checking the cluster file", check)
    _check_gpus(mesh, world)
    ranks = Ranks.of(mesh.size, world)
    on_gpu = "GPU" in ranks.devices[0]
    timer = Timer(ranks, budget_s)
    with reporting("measuring", wanted=world is None or world.rank == 0) as report:
        with report.at("", budget_s):
            sizes = ON_GPU if on_gpu else ON_CPU
            found = measure(mesh, _machine(mesh, ranks), timer, sizes, report.tell)
    # Figures are agreed upon already; what is one file's on one rank is the same on all.
    cluster = cluster_of(on_first(world, "calibrating", lambda: describe(found)))
    if path is not None:
        on_first(world, "writing the cluster file", lambda: write_cluster(cluster, path))
    return cluster


def _check_gpus(mesh: Mesh, world: World | None) -> None:
    gpus = len(tf.config.list_physical_devices("GPU"))
    if world is None and 0 < gpus < mesh.size:
        raise TfparError(
            f"The mesh {mesh} has {mesh.size} ranks, but this process sees {gpus} GPUs. Use a "
            f"smaller mesh, or set CUDA_VISIBLE_DEVICES=-1 to measure ranks on the CPU."
        )


def _machine(mesh: Mesh, ranks: Ranks) -> MachineInfo:
    here = detect_cluster(Mesh.of([1, mesh.size]))
    detected, host = here.device, here.nodes[0].host_memory_bytes
    if ranks.world is None:
        one_memory = len(set(map(memory_of, ranks.devices))) == 1
        nodes = 1
    else:
        job, one_memory = ranks.world.job, False
        nodes = job.nodes if job.nodes * job.local_size == mesh.size else 1
    link = detected.host_bandwidth
    compiles = XlaKernels(ranks.devices[0]) if math.isfinite(link) else None
    name, memory = detected.name, detected.memory_bytes
    return MachineInfo(nodes, name, memory, one_memory, link, host, compiles)


# --- measurement ----------------------------------------------------------------------------

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
