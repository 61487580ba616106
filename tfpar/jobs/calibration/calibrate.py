"""`tap.calibrate`: a cluster from measurements."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfpar.cluster.description import Cluster
from tfpar.cluster.files import cluster_of, describe, write_cluster
from tfpar.jobs.calibration.measure import measure
from tfpar.jobs.calibration.timing import Timer
from tfpar.jobs.calibration.workload import ON_CPU, ON_GPU, MachineInfo
from tfpar.progress import reporting
from tfpar.settings import MeshLike
from tfpar.spec import Mesh, TfparError, arguments
from tfpar.tf.distributed.world import World, this_world
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
        _on_first(world, "checking the cluster file", check)
    _check_gpus(mesh, world)
    ranks = Ranks.of(mesh.size, world)
    on_gpu = "GPU" in ranks.devices[0]
    timer = Timer(ranks, budget_s)
    with reporting("measuring", wanted=world is None or world.rank == 0) as report:
        with report.at("", budget_s):
            sizes = ON_GPU if on_gpu else ON_CPU
            found = measure(mesh, _machine(mesh, ranks), timer, sizes, report.tell)
    # Figures are agreed upon already; what is one file's on one rank is the same on all.
    cluster = cluster_of(_on_first(world, "calibrating", lambda: describe(found)))
    if path is not None:
        _on_first(world, "writing the cluster file", lambda: write_cluster(cluster, path))
    return cluster


def _check_gpus(mesh: Mesh, world: World | None) -> None:
    gpus = len(tf.config.list_physical_devices("GPU"))
    if world is None and 0 < gpus < mesh.size:
        raise TfparError(
            f"The mesh {mesh} has {mesh.size} ranks, but this process sees {gpus} GPUs. Use a "
            f"smaller mesh, or set CUDA_VISIBLE_DEVICES=-1 to measure ranks on the CPU."
        )


def _on_first(world: World | None, what: str, make: Callable[[], Any]) -> Any:
    return make() if world is None else world.first(what, make)


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
    return MachineInfo(nodes, detected.name, detected.memory_bytes, one_memory, link, host)
