"""A plan as a networkx graph."""

import dataclasses
import json

import networkx as nx
import pytest

from tests.plan.graphs import mlp, partition
from tfpar.cluster import find_cluster
from tfpar.constraints import shard
from tfpar.plans import Plan, plan_from_constraints
from tfpar.spec import Mesh, PlanError, parse_spec

MESH = Mesh.of([2, 4])


@pytest.fixture(scope="module")
def plan() -> Plan:
    graph = mlp(hidden=16)
    made = plan_from_constraints(graph, MESH, [shard(".*fc1/kernel", 1, "model")])
    return made.with_partitioned(partition(graph, made))


def test_nodes_are_scopes_in_the_order_of_the_model(plan):
    graph = plan.graph()
    weighted = [name for name, weights in graph.nodes.data("weights") if weights]
    assert weighted == ["block_0/fc1", "block_0/fc2", "head"]
    assert nx.dag_longest_path(graph)[:4] == ["x", *weighted]
    assert graph.graph["mesh"] == str(MESH)


def test_a_node_says_what_it_computes_and_how_its_weights_lie(plan):
    node = plan.graph().nodes["block_0/fc1"]
    assert node["kind"] == "MatMul" and node["flops"] == 2 * 8 * 6 * 16
    kernel, bias = 6 * 16 * 4, 16 * 4
    assert node["weights"] == {"block_0/fc1/kernel": "R,S(1)", "block_0/fc1/bias": "R,S(0)"}
    assert node["weight_bytes"] == kernel + bias
    assert node["device_weight_bytes"] == (kernel + bias) // 4
    assert parse_spec(node["weights"]["block_0/fc1/kernel"])


def test_an_edge_says_which_tensors_flow_and_how(plan):
    (tensor,) = plan.graph().edges["block_0/fc1", "block_0/fc2"]["tensors"]
    assert tensor == {
        "name": "mlp/block_0/fc1/Relu:0",
        "shape": [8, 16],
        "dtype": "float32",
        "bytes": 512,
        "spec": "S(0),S(1)",
        "read_as": ["S(0),S(1)"],
    }


def test_a_tensor_that_is_moved_is_read_in_another_spec():
    graph = mlp(hidden=16)
    made = plan_from_constraints(graph, MESH, [shard("head/kernel", 0, "model")])
    edges = made.graph(partition(graph, made)).edges
    (tensor,) = edges["block_0/fc2", "head"]["tensors"]
    assert (tensor["spec"], tensor["read_as"]) == ("S(0),R", ["S(0),S(1)"])


def test_all_values_are_plain(plan):
    graph = plan.graph()
    again = nx.node_link_graph(
        json.loads(json.dumps(nx.node_link_data(graph, edges="e"))), edges="e"
    )
    assert nx.utils.graphs_equal(graph, again)


def test_times_and_collectives_are_there_where_machines_are_known(plan):
    assert "seconds" not in plan.graph().nodes["block_0/fc1"]
    on = dataclasses.replace(plan, cluster=find_cluster("v100-ethernet", MESH))
    nodes = on.graph().nodes
    assert nodes["block_0/fc1"]["seconds"] > 0
    assert nodes["block_0/fc2"]["collectives"] == {"all_reduce over model": 1}


def test_blocks_that_repeat_are_numbered():
    from tests.ir.blocks import chain

    graph = chain([f"m/layer_{i}" for i in range(4)])
    made = plan_from_constraints(graph, Mesh.of([2]), [])
    nodes = made.graph(partition(graph, made)).nodes
    placed = [(nodes[f"m/layer_{i}"]["block"], nodes[f"m/layer_{i}"]["instance"]) for i in range(4)]
    assert placed == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert "block" not in nodes["x"]


def test_a_plan_from_a_file_has_the_same_graph(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json").graph()
    assert nx.utils.graphs_equal(again, plan.graph())


def test_a_plan_that_was_saved_without_its_graph_has_none(plan, tmp_path):
    unknown = dataclasses.replace(plan, partitioned=None)
    unknown.save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match=r"holds no graph.*tap\.plan_of\(model\)"):
        Plan.load(tmp_path / "plan.json").graph()
