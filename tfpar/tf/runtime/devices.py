"""Devices of the in-process ranks."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

import tensorflow as tf

from tfpar.spec import Mesh, Shard, Spec, TfparError
from tfpar.tf.interop import runtime

logger = logging.getLogger("tfpar")


def rank_devices(num_ranks: int) -> list[str]:
    """One device name per rank.

    With at least `num_ranks` GPUs every rank has its own. A GPU counts as many times as it was cut
    into logical devices (`tf.config.set_logical_device_configuration`), so that a plan can be
    tried on fewer. On CPU each rank gets a virtual device of its own if TensorFlow's runtime has
    not started yet; if it has, ranks share the logical CPUs there are, and a line in the log says
    so.
    """
    if num_gpus() >= num_ranks:
        return [d.name for d in tf.config.list_logical_devices("GPU")[:num_ranks]]
    if not runtime.is_started():
        cpu = tf.config.list_physical_devices("CPU")[0]
        configured = tf.config.get_logical_device_configuration(cpu) or []
        if len(configured) < num_ranks:
            tf.config.set_logical_device_configuration(
                cpu, [tf.config.LogicalDeviceConfiguration()] * num_ranks
            )
    cpus = [d.name for d in tf.config.list_logical_devices("CPU")]
    if len(cpus) < num_ranks:
        logger.info(
            "%d ranks share %d logical CPU device(s): TensorFlow's runtime had started before "
            "tfpar.auto_parallel could configure more.",
            num_ranks,
            len(cpus),
        )
    return [_full_name(cpus[r % len(cpus)]) for r in range(num_ranks)]


def num_gpus() -> int:
    """Count the GPUs for ranks; of one that is cut into logical devices, each of these counts."""
    gpus = tf.config.list_physical_devices("GPU")
    if runtime.is_started() and gpus:
        return len(tf.config.list_logical_devices("GPU"))
    return sum(len(tf.config.get_logical_device_configuration(gpu) or [gpu]) for gpu in gpus)


def own_device(local_rank: int, local_size: int) -> str:
    """The device of the one rank of this process: its GPU, if the machine has any, or its CPU.

    Ranks that share a machine's cores share them out, unless TensorFlow has been told how many
    threads to use.

    Raises:
        TfparError: the machine has GPUs, but fewer than ranks.
    """
    # Kernels of one rank then start in the order in which they are issued, so that a collective
    # is not held up by compute issued after it. CUDA reads it as it starts, with the first call.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        # A single one may be this rank's alone, by a scheduler, who says so in the variable.
        shared = len(gpus) > 1 or "CUDA_VISIBLE_DEVICES" not in os.environ
        if shared and len(gpus) < max(local_size, local_rank + 1):
            raise TfparError(
                f"Local rank {local_rank} of {local_size} has no GPU of its own: it sees "
                f"{len(gpus)}. Start one rank a GPU, or set CUDA_VISIBLE_DEVICES=-1 to compute "
                f"on the CPU."
            )
        # A scheduler may have left each rank its own GPU only.
        own = gpus[local_rank if len(gpus) > 1 else 0]
        tf.config.set_visible_devices(own, "GPU")
        tf.config.experimental.set_memory_growth(own, True)
        return "/job:localhost/replica:0/task:0/device:GPU:0"
    if not runtime.is_started() and not tf.config.threading.get_intra_op_parallelism_threads():
        share = len(os.sched_getaffinity(0)) // local_size
        tf.config.threading.set_intra_op_parallelism_threads(max(1, share))
    return "/job:localhost/replica:0/task:0/device:CPU:0"


def is_cpu(device: str) -> bool:
    """Whether a device of this name is cores of its host."""
    return device.partition("/device:")[2].startswith("CPU:")


def memory_of(device: str) -> str:
    """The memory in which `device` computes: that of its host for every CPU device."""
    return device.partition("/device:")[0] if is_cpu(device) else device


def host_of(device: str) -> str:
    """The device that computes in the memory of the host of `device`: its first CPU."""
    return f"{_full_name(device).partition('/device:')[0]}/device:CPU:0"


def holders(spec: Spec, mesh: Mesh, devices: Sequence[str]) -> tuple[int, ...]:
    """Return, for each rank, the rank whose shard of a variable of spec `spec` it uses.

    Ranks in one memory whose shards are the same hold them once, with the first of them.
    """
    split = [a for a, placement in enumerate(spec) if isinstance(placement, Shard)]
    first: dict[tuple, int] = {}
    found = []
    for rank, device in enumerate(devices):
        at = mesh.coordinates(rank)
        found.append(first.setdefault((memory_of(device), *(at[a] for a in split)), rank))
    return tuple(found)


def _full_name(device: str) -> str:
    return f"/job:localhost/replica:0/task:0{device}" if device.startswith("/device:") else device
