"""Merging of the calls of a layer that is called several times: they share their weights."""

from __future__ import annotations

import networkx as nx

from tfpar.ir.graph_nodes import GraphNode, NodeGraph


def merge_repeated_calls(nodes: NodeGraph) -> NodeGraph:
    """The nodes of a graph, those that hold the same weights as one, where the first of them is."""
    first: dict[tuple[str, ...], GraphNode] = {}
    calls: dict[GraphNode, list[GraphNode]] = {}
    for node in nodes.nodes:
        held = tuple(weight.name for weight in node.weights)
        calls.setdefault(first.setdefault(held, node) if held else node, []).append(node)
    if len(calls) == len(nodes.nodes):
        return nodes
    joined: dict[GraphNode, GraphNode] = {}
    for node, same in calls.items():
        ops = [op for call in same for op in call.ops]
        whole = node if len(same) == 1 else GraphNode(node.name, ops, node.weights)
        joined.update(dict.fromkeys(same, whole))
    flow = nx.DiGraph()
    flow.add_nodes_from(dict.fromkeys(joined[node] for node in nodes.nodes))
    for source, target in nodes.graph.edges:
        if joined[source] is not joined[target]:
            flow.add_edge(joined[source], joined[target])
    return NodeGraph(flow, {op: joined[node] for op, node in nodes.node_of.items()})
