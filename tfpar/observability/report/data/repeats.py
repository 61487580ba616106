"""Layers that are members of repeated blocks (TAP, section IV-D)."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from tfpar.ir.constants import Constants
from tfpar.ir.graph import Graph
from tfpar.ir.graph_nodes import GraphNode, NodeGraph
from tfpar.ir.roles import Roles
from tfpar.ir.shared_subgraphs import Signatures, prune_graph, repeated_blocks
from tfpar.observability.report.data.schema import Repeat

_PARTS = re.compile(r"\d+|[^\d/_]+|[/_]")


def repeats_of(
    graph: Graph, nodes: NodeGraph, roles: Roles, paths: Mapping[GraphNode, str]
) -> dict[GraphNode, Repeat]:
    """The place of each node that is part of a block that repeats."""
    signatures = Signatures(Constants(graph), roles)
    found: dict[GraphNode, Repeat] = {}
    blocks = repeated_blocks(nodes, prune_graph(nodes, signatures), signatures)
    for number, block in enumerate(blocks):
        # Ops between layers, such as sums, may be called something else.
        own = [
            _holder([paths[node] for node in members if node.weights])
            for members in block.instances
        ]
        name = _pattern(own)
        for i, members in enumerate(block.instances):
            for member, node in enumerate(members):
                found[node] = Repeat(number, name, i, block.count, member)
    return found


def _holder(paths: Sequence[str]) -> str:
    """The path that all of a block's layers lie in, or what their names begin with
    (`block_0_fc1` and `block_0_fc2` with `block_0`); that of the first if they have nothing in
    common."""
    if len(paths) == 1:
        return paths[0]
    common = os.path.commonprefix([_PARTS.findall(path) for path in paths])
    text = "".join(common)
    if not any(path == text or path[len(text)] in "/_.-" for path in paths):
        text = text.rpartition("/")[0] or text.rpartition("_")[0]
    return text.rstrip("/_.-") or paths[0]


def _pattern(names: Sequence[str]) -> str:
    """Return the common name of instances, with `*` for the numbers in which they differ."""
    parts = [_PARTS.findall(name) for name in names]
    if len({len(own) for own in parts}) > 1:
        return f"{names[0]} ..."
    columns = zip(*parts, strict=True)
    return "".join(own[0] if len(set(own)) == 1 else "*" for own in map(list, columns))
