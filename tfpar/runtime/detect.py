"""What there is to run on: the ranks, and the cluster that plans are made for if none is named."""

from __future__ import annotations

import tensorflow as tf

from tfpar.cost.cluster import PRESETS, Cluster
from tfpar.distributed.world import this_world
from tfpar.spec import Mesh, TfparError

_GPU_PRESETS = (("V100", "v100-nvlink"), ("A100", "a100"), ("H100", "a100"), ("H200", "a100"))


def every_rank() -> Mesh:
    """All processes of the job, by machine; in a process that runs alone, its GPUs.

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
    gpus = len(tf.config.list_physical_devices("GPU"))
    if not gpus:
        raise TfparError(
            "auto_parallel needs a mesh, e.g. tap.split([2, 4]), or a plan: this process is not "
            "part of a job (`tfpar run -np 4 ...`), and the machine has no GPU."
        )
    return Mesh.of([gpus])


def detect_cluster(mesh: Mesh) -> Cluster:
    """The cluster of `mesh`'s ranks on machines like this one.

    GPUs by their name (an unknown one counts as an A100), else CPU ranks that share this
    machine, or those of the job's machines. Of a mesh with several axes the first counts nodes.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        world = this_world()
        if world is None:
            return Cluster.of("cpu", mesh)
        job = world.job
        if job.nodes * job.local_size == mesh.size:
            return PRESETS["cpu-processes"](job.nodes, job.local_size)
        return Cluster.of("cpu-processes", mesh)
    name = str(tf.config.experimental.get_device_details(gpus[0]).get("device_name", ""))
    preset = next((preset for known, preset in _GPU_PRESETS if known in name), "a100")
    if len(gpus) >= mesh.size:
        return PRESETS[preset](1, mesh.size)
    return Cluster.of(preset, mesh)
