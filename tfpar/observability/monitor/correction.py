"""Correction of a cluster's figures by what a training measured."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from tfpar.cluster.description import Cluster, MeasuredCollective
from tfpar.cluster.scaling import AS_DESCRIBED, LinkSlowdown, scale_times, spans_nodes
from tfpar.cost.collectives import lines
from tfpar.jobs.calibration.links import axes_to_measure, collectives_of
from tfpar.jobs.calibration.timing import Timer
from tfpar.jobs.calibration.workload import ON_CPU, ON_GPU
from tfpar.observability.monitor.step_parts import EACH_S
from tfpar.spec import Mesh
from tfpar.tf.runtime.ranks import Ranks

_LEAST = 1e-3  # how many times as long anything takes: a time of nothing is noise


def measure_links(mesh: Mesh, ranks: Ranks) -> list[MeasuredCollective]:
    """All-reduces of two sizes along each axis that a search may lay over the ranks, timed as a
    calibration times them; all ranks call it together.

    Args:
        mesh: all ranks, in their physical shape.
    """
    sizes = ON_GPU if "GPU" in ranks.devices[0] else ON_CPU
    sizes = dataclasses.replace(sizes, payloads=sizes.payloads[:2])
    timer = Timer(ranks, EACH_S * len(sizes.payloads) * len(axes_to_measure(mesh)))
    return collectives_of(mesh, timer, sizes, 0.0, lambda what: None, kinds=("all_reduce",))


def correct_cluster(cluster: Cluster, found: Sequence[MeasuredCollective], work: float) -> Cluster:
    """`cluster` with the collectives that were found, and all else in proportion.

    What was not measured starts, and moves a byte, as many times as slowly as described as
    all-reduces do over the same kind of links, within nodes or between them.

    Args:
        found: all-reduces, along axes of meshes of all ranks.
        work: how many times as long as described the work between collectives takes.
    """
    within, between = (
        _mean(
            [
                _pace(one, cluster)
                for one in found
                if not one.group and spans_nodes(cluster, one.mesh, one.axis) == spans
            ]
        )
        for spans in (False, True)
    )
    changed = scale_times(cluster, work=work, within=within, between=between)
    known = {(one.kind, one.mesh, one.axis) for one in found}
    kept = [m for m in changed.measured if (m.kind, m.mesh, m.axis) not in known]
    return dataclasses.replace(changed, measured=(*found, *kept))


def _pace(one: MeasuredCollective, cluster: Cluster) -> LinkSlowdown:
    """Return the slowdown of a measured collective against the described algorithm.

    Of several algorithms it is the one that is fastest for large payloads.
    """
    described = lines(one.kind, (one.axis,), Mesh.of(one.mesh), cluster)
    start_s, per_byte_s = min(described, key=lambda line: line[1])
    start = max(one.startup_s / start_s, _LEAST) if start_s else 1.0
    return LinkSlowdown(start, max(1.0 / (one.bandwidth * per_byte_s), _LEAST))


def _mean(paces: Sequence[LinkSlowdown]) -> LinkSlowdown:
    """Average the slowdowns of links of a type; without any, links are as described."""
    if not paces:
        return AS_DESCRIBED
    start, byte = (statistics.geometric_mean(some) for some in zip(*paces, strict=True))
    return LinkSlowdown(start, byte)
