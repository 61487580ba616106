"""Seconds of ops on one device are those that a plan for one device is priced with."""

import pytest

from tests.graphs import saved
from tfpar.cluster.named import read_preset
from tfpar.cost.evaluate import evaluate
from tfpar.ir.planning_graph import planning_graph
from tfpar.ir.roles import BACKWARD, FORWARD, Roles
from tfpar.propagation.engine import propagate
from tfpar.propagation.partitioned import Anchors
from tfpar.propagation.prepared import prepare
from tfpar.search.stages.from_step import assign_step
from tfpar.search.stages.one_device import one_device_seconds
from tfpar.spec import Mesh, replicated


@pytest.mark.parametrize("name", ["gpt", "recurrent", "unet"])
def test_they_add_up_to_the_step(name):
    step = saved(name)
    graph = planning_graph(step.graph, step.gradients).graph
    roles, prepared, cluster = Roles.of(graph), prepare(graph), read_preset("dgx-a100")
    seconds = one_device_seconds(prepared, cluster, roles)
    assert {*seconds} == {*graph.ops}
    whole = replicated(1)
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
