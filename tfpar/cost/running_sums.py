"""Cost of sums over microbatches: each adds its part to the sum so far, in the task that makes it
(`compile.local.task_body`), which reads both and writes a sum."""

from __future__ import annotations

from tfpar.cost.pricer import Pricer
from tfpar.pipeline.statistics import BatchStatistics
from tfpar.propagation.communication import Communication
from tfpar.spec import Replicate

_SUMMED = ("all_reduce", "reduce_scatter")
_PASSES = 3


def adding_seconds(
    communication: Communication, pricer: Pricer, statistics: BatchStatistics
) -> float:
    """Price the adding of one microbatch's part to the sum that a collective over all of them
    makes; 0 of other collectives.

    Args:
        pricer: of the mesh with the axis of the microbatches behind those of ranks.
        statistics: of the batch, those that each microbatch has of its own.
    """
    step, _, op, tensor = communication
    micro, device = pricer.mesh.num_axes - 1, pricer.cluster.device
    if tensor is None or step.kind not in _SUMMED or micro not in step.axes:
        return 0.0
    if not isinstance(step.after[micro], Replicate) or op in statistics.sums:
        return 0.0
    moved = _PASSES * pricer.local_bytes(tensor, step.before) / pricer.alike(step.before)
    return pricer.roles.times.get(op, 1) * (device.launch_s + moved / device.memory_bandwidth)
