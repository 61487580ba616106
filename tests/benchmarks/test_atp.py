"""What the benchmark of ATP's meshes shows, on a model small enough for a test."""

from __future__ import annotations

import dataclasses

import pytest

import tfpar as tap
from benchmarks import atp
from tfpar.cluster import fit_to_mesh, read_preset


def test_megatron_s_curve_rises_and_the_best_mesh_s_falls():
    """Fig. 12 of the paper."""
    found = atp.curves("atp-ic5", (4, 8, 16, 32, 64, 128))
    assert found["ATP-1"] == sorted(found["ATP-1"]) and len(set(found["ATP-1"])) == 6
    best = found["ATP-OPT"]
    assert best[2:] == sorted(best[2:], reverse=True) and best[-1] < best[0] / 2


@pytest.fixture(scope="module")
def step():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(atp, "LENGTH", 128)
        patch.setattr(atp, "HEAD_SIZE", 32)
        yield atp.capture(512)


def without_starts(preset, size):
    """The preset's links, on which nothing takes time to start: the test's model is small."""
    cluster = fit_to_mesh(read_preset(preset), tap.Mesh.of([size])).with_device(launch_s=0.0)

    def started(levels):
        return tuple(dataclasses.replace(level, latency_s=0.0) for level in levels)

    measured = tuple(dataclasses.replace(m, startup_s=0.0) for m in cluster.measured)
    (node,) = cluster.nodes
    node = dataclasses.replace(node, levels=started(node.levels))
    return dataclasses.replace(
        cluster, nodes=(node,), levels=started(cluster.levels), measured=measured
    )


@pytest.mark.slow
@pytest.mark.parametrize("preset, size, best", [("atp-ic1", 8, (2, 4)), ("atp-ic4", 16, (8, 2))])
def test_what_the_step_waits_for_agrees_with_the_paper(step, preset, size, best):
    cluster = without_starts(preset, size)
    meshes = [(size // d2, d2) for d2 in (1, 2, 4)]
    waiting = {mesh: sum(atp.price(step, cluster, *mesh).communication_s) for mesh in meshes}
    assert min(waiting, key=waiting.__getitem__) == best, waiting
