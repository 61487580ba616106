"""A cluster whose figures are what a training measured."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

from tfpar.calibration.asked import ON_CPU, ON_GPU
from tfpar.calibration.links import axes_to_measure, collectives_of
from tfpar.calibration.timing import Timer
from tfpar.cluster.changed import spans_nodes, taking
from tfpar.cluster.description import Cluster, Measured
from tfpar.cost.collectives import collective_seconds
from tfpar.monitor.parts import EACH_S
from tfpar.runtime.ranks import Ranks
from tfpar.spec import Mesh


def measure_links(mesh: Mesh, ranks: Ranks) -> list[Measured]:
    """All-reduces of two sizes along each axis that a search may lay over the ranks, timed as a
    calibration times them; all ranks call it together.

    Args:
        mesh: all ranks, in their physical shape.
    """
    sizes = ON_GPU if "GPU" in ranks.devices[0] else ON_CPU
    sizes = dataclasses.replace(sizes, payloads=sizes.payloads[:2])
    timer = Timer(ranks, EACH_S * len(sizes.payloads) * len(axes_to_measure(mesh)))
    return collectives_of(mesh, timer, sizes, 0.0, lambda what: None, kinds=("all_reduce",))


def corrected(cluster: Cluster, found: Sequence[Measured], work: float) -> Cluster:
    """`cluster` with the collectives that were found, and all else in proportion.

    What was not measured takes as many times as long as described as what was: other collectives
    as all-reduces of large payloads over the same kind of links, within nodes or between them.

    Args:
        found: all-reduces, along axes of meshes of all ranks.
        work: how many times as long as described the work between collectives takes.
    """
    within, between = (
        statistics.geometric_mean(
            [
                _ratio(one, cluster)
                for one in found
                if not one.group and spans_nodes(cluster, one.mesh, one.axis) == spans
            ]
            or [1.0]
        )
        for spans in (False, True)
    )
    changed = taking(cluster, work=work, within=within, between=between)
    known = {(one.kind, one.mesh, one.axis) for one in found}
    kept = [m for m in changed.measured if (m.kind, m.mesh, m.axis) not in known]
    return dataclasses.replace(changed, measured=(*found, *kept))


def _ratio(one: Measured, cluster: Cluster) -> float:
    """How many times as long as described it takes, of a payload beside which its start is
    little."""
    payload = max(1e6, 10 * one.startup_s * one.bandwidth)
    mesh = Mesh.of(one.mesh)
    described_s = collective_seconds(one.kind, (one.axis,), payload, mesh, cluster)
    taken_s = one.startup_s + payload / one.bandwidth
    return taken_s / described_s if 0 < described_s < math.inf else 1.0
