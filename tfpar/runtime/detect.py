"""What this machine is: the cluster that a plan is made for if none is named."""

from __future__ import annotations

import tensorflow as tf

from tfpar.cost.cluster import PRESETS, Cluster
from tfpar.spec import Mesh

_GPU_PRESETS = (("V100", "v100-nvlink"), ("A100", "a100"), ("H100", "a100"), ("H200", "a100"))


def detect_cluster(mesh: Mesh) -> Cluster:
    """The cluster of `mesh`'s ranks on machines like this one.

    GPUs by their name (an unknown one counts as an A100), else CPU ranks that share this
    machine. Of a mesh with several axes the first counts nodes.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return Cluster.of("cpu", mesh)
    name = str(tf.config.experimental.get_device_details(gpus[0]).get("device_name", ""))
    preset = next((preset for known, preset in _GPU_PRESETS if known in name), "a100")
    if len(gpus) >= mesh.size:
        return PRESETS[preset](1, mesh.size)
    return Cluster.of(preset, mesh)
