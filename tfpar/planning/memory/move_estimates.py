"""Estimates of moves that change the graph of a step, in closed form: recompute and offload.

What a changed graph adds to a step is known before any layout is: none spreads an op over more
ranks than there are. So each rank starts every op, and has at least an even share of its
arithmetic, of what it reads and writes, and of what it copies to its host and back:

    least seconds = sum over ops of launch_s + max(flops / rate, bytes / memory_bandwidth) / ranks

What is saved is as much of it: an even share of what the backward pass no longer reads from memory,
of as many microbatches as are kept at a time. Where ranks do and keep the same, both are more.

Example: a block of 10^12 FLOPs on 4 ranks of 10^12 FLOP/s keeps 2 GB, 0.5 GB a rank. To compute it
again takes 0.25 s at least, 0.5 ns for each byte. Copies at 10 GB/s there and back take 0.1 s, 0.2
ns for each byte, so the link is the cheaper way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tfpar.cluster.description import Cluster
from tfpar.cost.op_compute import flops, update_seconds
from tfpar.ir.constants import Constants
from tfpar.ir.graph import Op, Tensor, itemsize
from tfpar.ir.roles import Roles
from tfpar.ir.traits import FREE, GIVES, ON_HOST, READ_PART, REGIONS, is_free
from tfpar.planning.memory.fit import MoveEstimate
from tfpar.planning.problem import Problem
from tfpar.rules.registry import find_rule


def estimate_change(problem: Problem, changed: Problem) -> MoveEstimate:
    """Estimate the move from a problem to that of the changed step: seconds added over bytes saved.

    That gradients are summed meanwhile, which hides some of what is added, is left out.
    """
    seconds = least_step_seconds(changed)
    added = seconds - least_step_seconds(problem)
    saved = activation_bytes(problem) - activation_bytes(changed)
    freed = problem.batch.kept_part * saved / problem.meshes[0].mesh.size
    return MoveEstimate(max(0.0, added) / freed if freed > 0 else math.inf, seconds)


def link_seconds_per_byte(cluster: Cluster) -> float:
    """Return the seconds that a byte of a slot takes to a device from its host and back, each step;
    the start of copies is left out."""
    return 0.0 if cluster.in_host_memory else 2 / cluster.device.host_bandwidth


def least_step_seconds(problem: Problem) -> float:
    """Return a lower bound of the seconds of a step in one piece, in any layout: see the module."""
    known, ranks = problem.memo.of(LeastStepSeconds), problem.meshes[0].mesh.size
    if ranks not in known:
        known[ranks] = _least_step_seconds(problem, ranks)
    return known[ranks]


def activation_bytes(problem: Problem) -> int:
    """Return the bytes of what the backward pass of a whole step reads from memory."""
    kept = Roles.of(problem.step.graph).activations
    return sum(t.num_bytes for t in kept if t.op.type not in FREE)


class LeastStepSeconds(dict[int, float]):
    """Lower bounds of the seconds of a step, by the number of ranks."""


def _least_step_seconds(problem: Problem, ranks: int) -> float:
    step, cluster = problem.step, problem.cluster
    constants = Constants(step.graph)
    seconds = cluster.step_s + sum(
        _op_seconds(op, constants, cluster, ranks, fused=step.jit_compile)
        for op in step.graph.ops
        if op not in step.zero_cost_ops
    )
    if step.state_ratio is None:  # the graph holds the update
        return seconds
    weights = sum(v.num_bytes for v in step.graph.variables if v.trainable) / ranks
    return seconds + update_seconds(weights, step.state_ratio, cluster, fused=step.jit_compile)


def _op_seconds(
    op: Op, constants: Constants, cluster: Cluster, ranks: int, *, fused: bool
) -> float:
    """Seconds of an op on one of so many ranks, at least.

    Args:
        fused: XLA compiles it, and may write and start nothing for it.
    """
    device = cluster.device
    if ON_HOST in op.attrs:
        crossing = op.outputs if op.attrs[ON_HOST] == GIVES else op.inputs
        return device.host_latency_s + _bytes(crossing) / ranks / device.host_bandwidth
    if is_free(op) or op.type in REGIONS:
        return 0.0
    rule = find_rule(op, constants)
    arithmetic = 0.0 if rule is None else flops(op, rule)
    arithmetic /= device.flops_of(op.outputs[0].dtype) if arithmetic else 1.0
    if fused:
        return arithmetic / ranks
    moved = _bytes([*op.inputs[op.type in READ_PART :], *op.outputs])
    return device.launch_s + max(arithmetic, moved / device.memory_bandwidth) / ranks


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(t.num_bytes for t in tensors if itemsize(t.dtype))
