"""GraphNodes: ops clustered by name scope, the unit of decision (TAP §IV-B).

A scope that reads weights is one node; the ops between such scopes form a node for each run of
them. Backward ops lie under `gradient_tape/<forward scope>` and join the node of the forward
op they are named after; sums of gradients and updates join what they sum or update.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence

import networkx as nx

from tfpar.ir.graph import Graph, Op, Tensor, Variable
from tfpar.ir.roles import FORWARD, Roles
from tfpar.ir.traits import HANDED_ON

_TAPE = "gradient_tape/"


@dataclasses.dataclass(eq=False)
class GraphNode:
    """A group of ops under one scope.

    Attributes:
        name: the scope, or the name of the first op of a run without weights.
        ops: forward ops in graph order, then what joined them.
        weights: the trainable variables that its forward ops read.
    """

    name: str
    ops: list[Op] = dataclasses.field(default_factory=list)
    weights: list[Variable] = dataclasses.field(default_factory=list)

    def __repr__(self) -> str:
        return f"<GraphNode {self.name}: {len(self.ops)} ops, {len(self.weights)} weights>"


@dataclasses.dataclass(frozen=True, eq=False)
class NodeGraph:
    """The GraphNodes of a graph, and what their forward ops read from each other.

    Attributes:
        graph: its nodes are GraphNodes in the order of their first ops; an edge leads from each
            to those that read from it, in order of first use. A scope whose ops run both before
            and after those of another closes a cycle.
    """

    graph: nx.DiGraph
    node_of: Mapping[Op, GraphNode]

    @functools.cached_property
    def nodes(self) -> Sequence[GraphNode]:
        """In the order of their first ops."""
        return tuple(self.graph)

    @functools.cached_property
    def order(self) -> Mapping[GraphNode, int]:
        """The place of each node on the way of the data, from the root (what nothing feeds).

        Breadth first, a node once all that it reads from are placed. What lies on a cycle and
        behind it comes last.
        """
        sequence: dict[GraphNode, None] = {}
        with contextlib.suppress(nx.NetworkXUnfeasible):
            for node in nx.topological_sort(self.graph):
                sequence[node] = None
        return {node: i for i, node in enumerate(dict.fromkeys((*sequence, *self.graph)))}

    def weighted(self) -> list[GraphNode]:
        """Return the nodes that bear weights."""
        return [node for node in self.nodes if node.weights]

    def segments(self, graph: Graph, roles: Roles) -> list[list[Op]]:
        """Return the graph's ops in order, cut where phase or node changes.

        Ops of nodes without weights go with those before them.
        """
        out: list[list[Op]] = []
        last: tuple[GraphNode | None, int] | None = None
        for op in graph.ops:
            node = self.node_of.get(op)
            if node is None or not node.weights:
                node = last[0] if last is not None else None
            key = (node, roles.phase[op])
            if key != last:
                out.append([])
                last = key
            out[-1].append(op)
        return out


def cluster(graph: Graph, roles: Roles) -> NodeGraph:
    """Cluster the ops of a graph into GraphNodes."""
    readers = weight_readers(graph)
    scopes = {
        _common_prefix(read.scope, op.scope)
        for pairs in readers.values()
        for read, op in pairs
        if roles.phase[op] == FORWARD
    }
    inner = {prefix for scope in scopes for prefix in _prefixes(scope)}
    names = {op.name for op in graph.ops}
    by_scope: dict[str, GraphNode] = {}
    node_of: dict[Op, GraphNode] = {}
    named: dict[str, GraphNode] = {}  # forward op names, after which backward ops are called
    run: tuple[str, GraphNode] | None = None
    for op in graph.ops:
        if roles.phase[op] != FORWARD:
            node = _joined(op, node_of, named, by_scope)
        else:
            scope = _longest(op.scope, scopes)
            if scope:
                node = by_scope.setdefault(scope, GraphNode(scope))
                run = None if op.inputs else run
            else:
                around = _longest(op.scope, inner)
                part = _part(op.scope, around)
                # TensorFlow puts constant operands below the op that reads them: no scope.
                part = around if part in names else part
                if run is None or run[0] != part:
                    run = (part, GraphNode(op.name))
                node = run[1]
            named[op.name] = node
        if node is not None:
            node.ops.append(op)
            node_of[op] = node
    for variable, pairs in readers.items():
        for _, op in pairs:
            node = node_of.get(op)
            if node is not None and roles.phase[op] == FORWARD and variable not in node.weights:
                node.weights.append(variable)
    return NodeGraph(_data_flow(node_of, roles), node_of)


def _data_flow(node_of: Mapping[Op, GraphNode], roles: Roles) -> nx.DiGraph:
    """Edges between the nodes that read from each other in the forward pass."""
    flow = nx.DiGraph()
    flow.add_nodes_from(dict.fromkeys(node_of.values()))
    for node in flow:
        forward = (op for op in node.ops if roles.phase[op] == FORWARD)
        sources = dict.fromkeys(node_of.get(t.op) for op in forward for t in op.inputs)
        flow.add_edges_from((s, node) for s in sources if s is not None and s is not node)
    return flow


def weight_readers(graph: Graph) -> dict[Variable, list[tuple[Op, Op]]]:
    """Find the pairs (op that reads the handle, op that uses the value) of each weight, in graph
    order.

    Ops that only relabel the value (casts, reshapes) are passed over.
    """
    consumers = graph.consumers()
    found: dict[Variable, list[tuple[Op, Op]]] = {}
    for variable in graph.variables:
        if not variable.trainable:
            continue
        pairs = found[variable] = []
        for read in consumers.get(variable.handle, ()):
            stack: list[Tensor] = list(read.outputs)
            if read.type != "ReadVariableOp":
                pairs.append((read, read))
                continue
            while stack:
                for op in consumers.get(stack.pop(), ()):
                    if op.type in HANDED_ON:
                        stack += op.outputs
                    else:
                        pairs.append((read, op))
    return found


def _joined(
    op: Op,
    node_of: Mapping[Op, GraphNode],
    named: Mapping[str, GraphNode],
    by_scope: Mapping[str, GraphNode],
) -> GraphNode | None:
    """The node that a backward or update op belongs to."""
    if op.name.startswith(_TAPE):
        for prefix in _prefixes(op.name[len(_TAPE) :]):
            node = named.get(prefix) or by_scope.get(prefix)
            if node is not None:
                return node
    owners = [node_of[t.op] for t in op.inputs if t.op in node_of]
    return next((n for n in owners if n.weights), owners[0] if owners else None)


def _prefixes(scope: str) -> Iterator[str]:
    """`scope` and the scopes around it, innermost first."""
    while scope:
        yield scope
        scope = scope.rpartition("/")[0]


def _part(scope: str, around: str) -> str:
    """The scope directly below `around` on the way to `scope`; `around` if that is it."""
    rest = scope[len(around) :].lstrip("/")
    return f"{around}/{rest.partition('/')[0]}" if rest else around


def _longest(scope: str, among: set[str]) -> str:
    return next((prefix for prefix in _prefixes(scope) if prefix in among), "")


def _common_prefix(one: str, other: str) -> str:
    own = set(_prefixes(one))
    return _longest(other, own)
