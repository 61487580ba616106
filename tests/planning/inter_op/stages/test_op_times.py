"""Seconds of ops on one device are those that a plan for one device is priced with."""

import dataclasses

import pytest

from tests.graphs import saved
from tfpar.cluster import read_preset
from tfpar.cost import evaluate
from tfpar.ir import BACKWARD, FORWARD, Roles, planning_graph
from tfpar.planning.inter_op.stages.op_times import SingleDeviceProfile
from tfpar.planning.inter_op.stages.unit_builder import assign_step
from tfpar.propagation import Anchors, prepare, propagate
from tfpar.spec import Mesh, TfparError, replicated_spec


@pytest.mark.parametrize("name", ["gpt", "recurrent", "unet"])
def test_they_add_up_to_the_step(name):
    step = saved(name)
    graph = planning_graph(step.graph, step.gradients).graph
    roles, prepared, cluster = Roles.of(graph), prepare(graph), read_preset("dgx-a100")
    seconds = SingleDeviceProfile(prepared, roles).seconds(cluster)
    assert {*seconds} == {*graph.ops}
    whole = replicated_spec(1)
    anchors = Anchors(
        variables={v.name: whole for v in graph.variables},
        inputs=[whole] * len(graph.inputs),
        outputs=[whole] * len(graph.outputs),
    )
    cost = evaluate(propagate(prepared, Mesh.of([1]), anchors), cluster, roles)
    for phase in (FORWARD, BACKWARD):
        total = sum(s for op, s in seconds.items() if roles.phase[op] == phase)
        assert total == pytest.approx(cost.compute_s[phase])
    units, found = assign_step(graph, roles, seconds.__getitem__, 2)
    assert units.graph.seconds == pytest.approx(sum(cost.compute_s[:2]))
    assert sum(found.seconds) == pytest.approx(sum(cost.compute_s[:2]))


def test_stages_have_the_pace_of_their_devices():
    """Three machines of V100s and one of T4s: a stage with ranks of both is as slow as T4s."""
    step, cluster = saved("gpt"), read_preset("aws-p3-g4dn").with_device(launch_s=0.0)
    graph = planning_graph(step.graph, step.gradients).graph
    roles, prepared = Roles.of(graph, step.gradient_tensors), prepare(graph)

    def paces(actors, size, machines=cluster, recompute=False):
        return SingleDeviceProfile(prepared, roles).paces(
            machines, actors, [size] * (max(actors) + 1), recompute
        )

    def seconds(machines, phases=(FORWARD, BACKWARD)):
        own = SingleDeviceProfile(prepared, roles).seconds(machines)
        return sum(s for op, s in own.items() if roles.phase[op] in phases)

    v100 = seconds(cluster.part(range(4))) / seconds(cluster)
    assert v100 < 0.6 and seconds(cluster.part(range(12, 16))) == seconds(cluster)
    assert paces((0, 1, 2, 3), 4) == (v100, v100, v100, 1.0)
    assert paces((0, 1), 8) == (v100, 1.0)
    assert paces((0, 1, 2, 3, 3, 2, 1, 0), 4) == (v100, v100, v100, 1.0, 1.0, v100, v100, v100)
    assert paces((0, 1, 2), 4) == (1.0, 1.0, 1.0)  # all V100s
    with pytest.raises(TfparError, match="16"):
        paces((0, 1), 16)
    alike = dataclasses.replace(cluster, nodes=(dataclasses.replace(cluster.nodes[0], count=4),))
    assert paces((0, 1), 16, alike) == (1.0, 1.0)
    twice = pytest.approx(1 + seconds(alike, [FORWARD]) / seconds(alike))
    assert paces((0, 1), 8, alike, (1,)) == (1.0, twice)
    assert paces((0, 1), 8, alike, True) == (1.0, 1.0)
