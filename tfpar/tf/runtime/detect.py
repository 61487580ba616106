"""Detection of the hardware: the ranks, and the cluster to plan for if the user names none."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfpar.cluster.description import Cluster
from tfpar.cluster.lookup import cpu_processes, find_cluster, fit_to_mesh, host_memory, read_preset
from tfpar.spec import Mesh, TfparError
from tfpar.tf.distributed.world import this_world
from tfpar.tf.runtime.devices import num_gpus

_GPU_PRESETS = (
    ("V100", "rhino-m8"),
    ("A100", "dgx-a100"),
    ("H100", "dgx-h100"),
    ("H200", "dgx-h100"),
)

LOCAL = "local"
"""The name of the cluster that is detected."""


def every_rank() -> Mesh:
    """Return the mesh of all processes of the job, by machine; without a job, of this one's GPUs.

    Raises:
        TfparError: neither a job nor a GPU.
    """
    world = this_world()
    if world is not None:
        job = world.job

        def sizes() -> list[int]:
            even = job.nodes * job.local_size == job.size
            return [job.nodes, job.local_size] if even and job.nodes > 1 else [job.size]

        return Mesh.of(world.first("finding the mesh", sizes))
    gpus = num_gpus()
    if not gpus:
        raise TfparError(
            "auto_parallel needs a mesh, e.g. tap.split([2, 4]), or a plan: this process is not "
            "part of a job (`tfpar run -np 4 ...`), and the machine has no GPU."
        )
    return Mesh.of([gpus])


def find_machines(
    mesh: Mesh, value: Cluster | Mapping[str, Any] | str | os.PathLike[str] | None = None
) -> Cluster:
    """Return the cluster to plan for, as `lookup.find_cluster` does; for None what is here. Of
    several kinds of machines the first devices, as many as there are ranks.

    Raises:
        TfparError: as `lookup.find_cluster`, or the mesh has more ranks than there are devices.
    """
    local = value is None or value == LOCAL
    cluster = detect_cluster(mesh) if local else find_cluster(value, mesh)  # type: ignore[arg-type]
    cluster.check(mesh)
    if len(cluster.nodes) > 1 and mesh.size < cluster.size:
        # Else all would be priced with the slowest kind of device, whether they have one or not.
        return cluster.part(range(mesh.size))
    return cluster


def detect_cluster(mesh: Mesh) -> Cluster:
    """The cluster of `mesh`'s ranks on machines like this one.

    GPUs by their name (an unknown one counts as an A100), with the memory of this host, else CPU
    ranks that share this machine, or those of the job's machines. Of a mesh with several axes the
    first counts nodes.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        world = this_world()
        if world is None:
            return find_cluster("cpu", mesh)
        job = world.job
        if job.nodes * job.local_size == mesh.size:
            return cpu_processes(job.nodes, job.local_size)
        return find_cluster("cpu-processes", mesh)
    name = str(tf.config.experimental.get_device_details(gpus[0]).get("device_name", ""))
    preset = next((preset for known, preset in _GPU_PRESETS if known in name), "dgx-a100")
    if num_gpus() >= mesh.size:
        mesh = Mesh.of([1, mesh.size])
    # Of a cloud's machines the rent is known, of these it is not.
    machines = read_preset(preset).with_device(price_per_hour=None, price_source="")
    return fit_to_mesh(machines, mesh).with_host_memory(host_memory())
