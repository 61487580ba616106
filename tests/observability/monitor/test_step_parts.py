"""What is said of a step, and a cluster as it was measured."""

from __future__ import annotations

import math

import pytest

from tfpar.cluster import (
    Cluster,
    Device,
    Level,
    LinkSlowdown,
    MeasuredCollective,
    scale_times,
    spans_nodes,
)
from tfpar.cost import collective_seconds, lines
from tfpar.observability.monitor.monitored_model import correct_cluster, measure_links
from tfpar.observability.monitor.step_parts import (
    DATA,
    WORK,
    ExpectedCollectives,
    StepPart,
    verdict,
)
from tfpar.spec import Mesh
from tfpar.tf.runtime import Ranks


@pytest.mark.parametrize(
    "predicted_s, step_s, parts, said",
    [
        (
            0.056,
            0.071,
            [StepPart("all_reduce over data", 0.02, 0.032), StepPart(WORK, 0.036, 0.039)],
            "predicted 56.00 ms a step, measured 71.00 ms: all_reduce over data takes 1.6 times as "
            "long; `tfpar calibrate`",
        ),
        (
            0.010,
            0.500,
            [StepPart(DATA, 0.0, 0.45), StepPart(WORK, 0.010, 0.050)],
            "predicted 10.00 ms a step, measured 500.00 ms: waiting for data takes 450.00 ms",
        ),
        (
            0.100,
            0.040,
            [StepPart("all_gather over model", 0.02, 0.03), StepPart(WORK, 0.08, 0.01)],
            f"predicted 100.00 ms a step, measured 40.00 ms: {WORK} takes 0.1 times as long; "
            f"`tfpar calibrate`",
        ),
        (
            0.056,
            0.060,
            [StepPart(WORK, 0.056, 0.060)],
            "predicted 56.00 ms a step, measured 60.00 ms",
        ),
    ],
)
def test_the_part_that_makes_the_difference_is_named(predicted_s, step_s, parts, said):
    assert verdict(predicted_s, step_s, parts) == said


GRADIENTS, GATHERS = ("all_reduce", (0,)), ("all_gather", (1,))


@pytest.mark.parametrize(
    "hideable_s, longer, exposed_s",
    [
        (3.5, 1.0, 0.5),  # as predicted
        (3.5, 2.0, 4.5),  # nothing more can hide
        (6.0, 2.0, 2.5),  # two seconds more hide behind the backward pass
        (9.0, 2.0, 0.5),  # and here all, but for the end of the last
        (3.5, 0.5, 0.0),
    ],
)
def test_what_runs_beside_the_backward_pass_hides_before_it_is_waited_for(
    hideable_s, longer, exposed_s
):
    expected = ExpectedCollectives({GATHERS: 1.0}, {GRADIENTS: 4.0}, 0.5, hideable_s)
    found = expected.seconds({GRADIENTS: longer, GATHERS: 3.0})
    assert found == {GATHERS: 3.0, GRADIENTS: pytest.approx(exposed_s)}


DEVICE = Device({"float32": 1e12, "bfloat16": 2e12}, 1e9, 1e11, 1e-6, functions_per_s=1e9)
LEVELS = [Level(2, 1e9, 1e-4), Level(4, 1e10, 1e-5)]
TWO_NODES = Cluster.regular("two", DEVICE, LEVELS, step_s=1e-3, algorithms=("ring",))
EVERYONE = Mesh.of([2, 4])


def test_all_takes_as_many_times_as_long_as_is_said():
    changed = scale_times(
        TWO_NODES, work=2.0, within=LinkSlowdown(3.0, 3.0), between=LinkSlowdown(5.0, 5.0)
    )
    assert changed.device.flops == {"float32": 5e11, "bfloat16": 1e12}
    assert changed.device.launch_s == pytest.approx(2e-6) and changed.step_s == pytest.approx(2e-3)
    assert changed.device.functions_per_s == 5e8
    for kind, payload in (("all_reduce", 1e3), ("all_gather", 1e8), ("all_to_all", 1e6)):
        for axis, factor in ((0, 5.0), (1, 3.0)):
            before, after = (
                collective_seconds(kind, (axis,), payload, EVERYONE, machines)
                for machines in (TWO_NODES, changed)
            )
            assert after == pytest.approx(factor * before)
    assert scale_times(TWO_NODES).fingerprint() == TWO_NODES.fingerprint()


def test_what_was_measured_before_is_changed_as_the_links_that_it_uses():
    known = [MeasuredCollective("broadcast", (2, 4), axis, 1e-3, 1e9) for axis in (0, 1)]
    machines = Cluster.regular("two", DEVICE, LEVELS, measured=tuple(known))
    assert [spans_nodes(machines, one.mesh, one.axis) for one in known] == [True, False]
    between, within = scale_times(
        machines, within=LinkSlowdown(2.0, 3.0), between=LinkSlowdown(4.0, 5.0)
    ).measured
    assert (between.startup_s, between.bandwidth) == pytest.approx((4e-3, 2e8))
    assert (within.startup_s, within.bandwidth) == (2e-3, pytest.approx(1e9 / 3))


def test_a_corrected_cluster_takes_what_was_found_and_the_rest_in_proportion():
    """All-reduces between nodes start three times as slowly as described and move bytes ten times
    as slowly; within nodes they are as described."""
    found = []
    for axis, start, byte in ((0, 3.0, 10.0), (1, 1.0, 1.0)):
        ((start_s, per_byte_s),) = lines("all_reduce", (axis,), EVERYONE, TWO_NODES)
        measured = MeasuredCollective(
            "all_reduce", (2, 4), axis, start * start_s, 1 / (byte * per_byte_s)
        )
        found.append(measured)
    machines = correct_cluster(TWO_NODES, found, work=2.0)
    for kind in ("all_reduce", "all_gather", "all_to_all"):
        for axis, start, byte in ((0, 3.0, 10.0), (1, 1.0, 1.0)):
            (before,) = lines(kind, (axis,), EVERYONE, TWO_NODES)
            (now,) = lines(kind, (axis,), EVERYONE, machines)
            assert now == pytest.approx((start * before[0], byte * before[1]))
    assert machines.device.flops["float32"] == 5e11
    again = correct_cluster(machines, found, work=1.0)
    assert again.measured == machines.measured  # nothing is kept twice
    assert again.fingerprint() == machines.fingerprint()


@pytest.mark.slow
def test_links_are_measured_along_each_axis_that_a_search_may_lay():
    found = measure_links(Mesh.of([2]), Ranks.of(2, None))
    (one,) = [m for m in found if not m.group]
    assert one.kind == "all_reduce" and Mesh.of(one.mesh).groups((one.axis,)) == ((0, 1),)
    assert 0 <= one.startup_s < 1 and 1e6 < one.bandwidth < math.inf
