"""Models with blocks that repeat: captured ones, and some written by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tfpar.rules  # noqa: F401 - registers the rules
from tests.graphs import saved
from tfpar.ir import (
    Constants,
    DType,
    Graph,
    GraphBuilder,
    Op,
    Roles,
    Tensor,
    Variable,
    planning_graph,
)
from tfpar.ir.graph_nodes import GraphNode, NodeGraph, cluster
from tfpar.ir.planning_graph import PlanningGraph
from tfpar.ir.shared_subgraphs import (
    RepeatedBlock,
    SharedSubgraph,
    Signatures,
    prune_graph,
    repeated_blocks,
)


@dataclasses.dataclass(eq=False)
class Parts:
    """What the search finds in a graph."""

    cut: PlanningGraph
    min_duplicate: int = 2

    def __post_init__(self) -> None:
        self.graph = self.cut.graph
        self.roles = Roles.of(self.graph)
        self.nodes: NodeGraph = cluster(self.graph, self.roles)
        self.signatures = Signatures(Constants(self.graph), self.roles)
        self.subgraphs: list[SharedSubgraph] = prune_graph(
            self.nodes, self.signatures, self.min_duplicate
        )
        self.repeats: list[RepeatedBlock] = repeated_blocks(
            self.nodes, self.subgraphs, self.signatures, self.min_duplicate
        )

    def node(self, name: str) -> GraphNode:
        return next(n for n in self.nodes.nodes if n.name == name)

    def counts(self) -> dict[str, int]:
        """How often each block of more than one weight is there, by its first node's name."""
        return {
            f.instances[0][0].name: f.count
            for f in self.repeats
            if sum(len(n.weights) for n in f.instances[0]) > 1
        }


def parts_of(graph: Graph, min_duplicate: int = 2) -> Parts:
    return Parts(planning_graph(graph, []), min_duplicate)


def saved_parts(name: str) -> Parts:
    """Those of a step that is saved; see `tests.graphs`."""
    step = saved(name)
    return Parts(planning_graph(step.graph, step.gradients))


def chain(scopes: Sequence[str], width: int = 4, activations: Sequence[str] = ("Relu",)) -> Graph:
    """x = activation(x @ kernel + bias) + x for each scope, the sum outside of it."""
    build = GraphBuilder()
    x = _placeholder(build, "x", (2, width), "float32")
    build.graph.inputs.append(x)
    for i, scope in enumerate(scopes):
        x = block(build, scope, x, activations[i % len(activations)])
    build.graph.outputs.append(x)
    return build.graph


def block(build: GraphBuilder, scope: str, x: Tensor, activation: str = "Relu") -> Tensor:
    width = x.shape[-1]
    build.name = f"{scope}/dense"
    attrs = {"T": DType("float32"), "transpose_a": False, "transpose_b": False}
    kernel = weight(build, f"{scope}/kernel", (width, width))
    h = build.one("MatMul", (x, kernel), x.shape, "float32", attrs)
    h = build.binary("AddV2", h, weight(build, f"{scope}/bias", (width,)))
    build.name = scope
    h = build.unary(activation, h)
    build.name = scope.rpartition("/")[0]
    return build.binary("AddV2", x, h)


def weight(build: GraphBuilder, name: str, shape: tuple[int, ...]) -> Tensor:
    handle = _placeholder(build, f"handle/{name}", shape, "resource")
    build.graph.variables.append(Variable(name, shape, "float32", True, handle))
    return build.one("ReadVariableOp", (handle,), shape, "float32", {"dtype": DType("float32")})


def named(graph: Graph, name: str) -> Op:
    return next(op for op in graph.ops if op.name == name)


def _placeholder(build: GraphBuilder, name: str, shape, dtype: str) -> Tensor:
    return build.emit("Placeholder", (), [(shape, dtype)], {"dtype": DType(dtype)}, name).outputs[0]
