"""Shared subgraphs (TAP §IV-C, Algorithm 1): what a model repeats.

The names of GraphNodes make a tree. At each depth, from the leaves up, nodes with a common prefix
are a block, and blocks of the same composition of operators are one shared subgraph if there are
enough of them. Names only say what belongs together: whether two blocks are equal is read off their
ops, so `alpha` and `beta` may be.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any

import networkx as nx

from tfpar.ir.constants import Constants
from tfpar.ir.graph import Op, Tensor, freeze
from tfpar.ir.graph_nodes import GraphNode, NodeGraph
from tfpar.ir.roles import FORWARD, Roles

_TOKENS = re.compile(r"[/_]+")
_UNSHARED_ATTRS = frozenset({"seed", "seed2", "value", "shape", "shared_name", "container"})


@dataclasses.dataclass(frozen=True, eq=False)
class Block:
    """GraphNodes with a common prefix, in graph order."""

    prefix: str
    nodes: Sequence[GraphNode]


@dataclasses.dataclass(frozen=True, eq=False)
class SharedSubgraph:
    """Blocks of the same composition of operators.

    Attributes:
        depth: of their prefixes in the name tree.
        variants: the blocks by shape: within one, all sizes are equal too and one plan and
            its cost serve all.
    """

    depth: int
    variants: Sequence[Sequence[Block]]

    @property
    def blocks(self) -> list[Block]:
        return [block for variant in self.variants for block in variant]

    @property
    def count(self) -> int:
        return sum(map(len, self.variants))


class Signatures:
    """Signatures, equal for equal ops and blocks; computed once per op."""

    def __init__(self, constants: Constants, roles: Roles) -> None:
        self._constants = constants
        self._phase = roles.phase
        self._ids: dict[Any, int] = {}
        self._of_op: dict[Op, int] = {}

    def op(self, op: Op) -> int:
        """Return a number that is equal for ops of one type, attributes, shapes and known integer
        operands."""
        known = self._of_op.get(op)
        if known is None:
            known = self._of_op[op] = self._intern(self._describe(op))
        return known

    def block(self, nodes: Iterable[GraphNode], shapes: bool) -> int:
        """Return a number that is equal for blocks whose forward ops are equal and wired in the
        same way.

        Args:
            shapes: also ask for equal attributes and shapes, not only op types.
        """
        ops = [op for node in nodes for op in self.forward(node)]
        place = {op: i for i, op in enumerate(ops)}
        outside: dict[Tensor, int] = {}
        described = []
        for op in ops:
            wires = tuple(
                (place[t.op], t.index)
                if t.op in place
                else -1
                if not shapes
                else -1 - outside.setdefault(t, len(outside))
                for t in op.inputs
            )
            described.append((self.op(op) if shapes else op.type, wires))
        return self._intern((shapes, tuple(described)))

    def forward(self, node: GraphNode) -> list[Op]:
        """Return the node's forward ops that compute something on data."""
        return [op for op in node.ops if self._phase[op] == FORWARD and op.type != "Placeholder"]

    def _intern(self, key: Any) -> int:
        return self._ids.setdefault(key, len(self._ids))

    def _describe(self, op: Op) -> Any:
        attrs = (
            ()
            if op.type == "Const"
            else tuple(
                (k, freeze(v))
                for k, v in sorted(op.attrs.items())
                if k not in _UNSHARED_ATTRS and not k.startswith("_")
            )
        )
        values = tuple(
            None if (v := self._constants.value(t)) is None else (v.shape, v.tobytes())
            for t in op.inputs
            if t.dtype in ("int32", "int64", "bool")
        )
        return (
            op.type,
            attrs,
            values,
            tuple((t.shape, t.dtype) for t in op.inputs),
            tuple((t.shape, t.dtype) for t in op.outputs),
        )


def prune_graph(
    nodes: NodeGraph, signatures: Signatures, min_duplicate: int = 2
) -> list[SharedSubgraph]:
    """Return the shared subgraphs of a model, deepest first (Algorithm 1).

    At each depth of the name tree the blocks with a weight are grouped by composition. A branch
    ends where its blocks have no likeness any more; what lies above is the model.

    Args:
        min_duplicate: how many blocks make a shared subgraph.
    """
    forward = [n for n in nodes.nodes if signatures.forward(n)]
    paths = {node: tuple(t for t in _TOKENS.split(node.name) if t) for node in forward}
    found: list[SharedSubgraph] = []
    ended: set[tuple[str, ...]] = set()
    for depth in range(max(map(len, paths.values()), default=0), 0, -1):
        groups: dict[tuple[str, ...], list[GraphNode]] = {}
        for node, path in paths.items():
            if len(path) >= depth:
                groups.setdefault(path[:depth], []).append(node)
        alike: dict[int, list[Block]] = {}
        for prefix, members in groups.items():
            if prefix not in ended and any(n.weights for n in members):
                block = Block("/".join(prefix), members)
                alike.setdefault(signatures.block(members, False), []).append(block)
        for blocks in alike.values():
            if len(blocks) < min_duplicate:
                # Deeper parts may be shared; what holds this block cannot be.
                for block in blocks:
                    path = tuple(block.prefix.split("/"))
                    ended.update(path[:i] for i in range(1, len(path)))
                continue
            variants: dict[int, list[Block]] = {}
            for block in blocks:
                variants.setdefault(signatures.block(block.nodes, True), []).append(block)
            found.append(SharedSubgraph(depth, list(variants.values())))
    return found


def largest(subgraphs: Sequence[SharedSubgraph], min_duplicate: int = 2) -> list[SharedSubgraph]:
    """Return the subgraphs that are no part of a larger one.

    A tower that mostly repeats one block is no subgraph, the block is.
    """
    kept = _outermost([s.blocks for s in subgraphs], _repeated(subgraphs, min_duplicate))
    return [subgraphs[i] for i in kept]


def _repeated(subgraphs: Sequence[SharedSubgraph], min_duplicate: int) -> list[Sequence[Block]]:
    """The blocks that repeat with equal shapes."""
    return [v for s in subgraphs for v in s.variants if len(v) >= min_duplicate]


def _outermost(groups: Sequence[Sequence[Block]], repeated: Sequence[Sequence[Block]]) -> list[int]:
    """Choose groups of equal blocks, the largest first, so that no two of them overlap."""
    sizes = [(-len(g[0].nodes), g[0].prefix.count("/")) for g in groups]
    taken: set[GraphNode] = set()
    kept = []
    for i in sorted(range(len(groups)), key=sizes.__getitem__):
        members = {n for block in groups[i] for n in block.nodes}
        if not members & taken and not _consists_of(groups[i][0], repeated):
            taken |= members
            kept.append(i)
    return sorted(kept)


def _consists_of(block: Block, repeated: Sequence[Sequence[Block]]) -> bool:
    """Whether most of a block is a smaller one of several weights, several times over."""
    members = set(block.nodes)
    total = _count_weighted(block)
    for group in repeated:
        weighted = _count_weighted(group[0])
        if weighted > 1 and len(group[0].nodes) < len(members):
            inside = sum(b.nodes[0] in members for b in group)
            if inside > 1 and 2 * inside * weighted > total:
                return True
    return False


def _count_weighted(block: Block) -> int:
    return sum(bool(n.weights) for n in block.nodes)


@dataclasses.dataclass(frozen=True, eq=False)
class RepeatedBlock:
    """Blocks that one plan serves: equal in structure and shapes.

    Attributes:
        instances: the nodes of each block, in graph order; blocks in the order in which they run.
    """

    instances: Sequence[Sequence[GraphNode]]

    @property
    def count(self) -> int:
        return len(self.instances)


def repeated_blocks(
    nodes: NodeGraph,
    subgraphs: Sequence[SharedSubgraph],
    signatures: Signatures,
    min_duplicate: int = 2,
) -> list[RepeatedBlock]:
    """Find the blocks to fold: the largest that repeat with equal shapes.

    Names may not show the block (a functional model whose layers are called `dense_7`): a run of
    blocks that repeats as a whole along the model is one larger block.
    """
    units = _units(nodes, subgraphs, signatures, min_duplicate)
    labels = [signatures.block(members, True) for members in units]
    out = []
    covered: set[int] = set()
    for start, period, count in _tandem_runs(labels, min_duplicate):
        covered.update(range(start, start + period * count))
        for part in _connected(units[start : start + period], nodes):
            instances = [
                [n for offset in part for n in units[start + i * period + offset]]
                for i in range(count)
            ]
            if any(n.weights for n in instances[0]):
                out.append(RepeatedBlock(instances))
    by_label: dict[int, list[Sequence[GraphNode]]] = {}
    for i, (label, members) in enumerate(zip(labels, units, strict=True)):
        if i not in covered and any(n.weights for n in members):
            by_label.setdefault(label, []).append(members)
    out += [RepeatedBlock(group) for group in by_label.values() if len(group) >= min_duplicate]
    return out


def _units(
    nodes: NodeGraph,
    subgraphs: Sequence[SharedSubgraph],
    signatures: Signatures,
    min_duplicate: int,
) -> list[Sequence[GraphNode]]:
    """The model in graph order as blocks that repeat and nodes of no such block."""
    repeated = _repeated(subgraphs, min_duplicate)
    unit_of = {
        n: block
        for i in _outermost(repeated, repeated)
        for block in repeated[i]
        for n in block.nodes
    }
    units: dict[Block | GraphNode, Sequence[GraphNode]] = {}
    for node in nodes.nodes:
        if signatures.forward(node):
            block = unit_of.get(node)
            units.setdefault(block or node, block.nodes if block else [node])
    return list(units.values())


def _connected(units: Sequence[Sequence[GraphNode]], nodes: NodeGraph) -> list[list[int]]:
    """The positions of `units` in groups that data flows between.

    Towers that are built side by side are as many blocks, however their layers interleave.
    """
    place = {n: i for i, members in enumerate(units) for n in members}
    joined = nx.Graph()
    joined.add_nodes_from(range(len(units)))
    joined.add_edges_from(
        (place[source], own)
        for node, own in place.items()
        for source in nodes.graph.predecessors(node)
        if source in place
    )
    return [sorted(part) for part in nx.connected_components(joined)]


def _tandem_runs(labels: Sequence[int], min_duplicate: int) -> list[tuple[int, int, int]]:
    """(start, period, count) of the runs that repeat back to back, not overlapping.

    The longest cover first; among equal ones the shortest period.
    """
    found = []
    size = len(labels)
    for period in range(1, size // 2 + 1):
        equal = 0
        for i in range(size - period + 1):
            if i + period < size and labels[i] == labels[i + period]:
                equal += 1
                continue
            count = equal // period + 1
            if count >= min_duplicate:
                found.append((i - equal, period, count))
            equal = 0
    kept: list[tuple[int, int, int]] = []
    taken: set[int] = set()
    for start, period, count in sorted(found, key=lambda r: (-r[1] * r[2], r[1], r[0])):
        span = range(start, start + period * count)
        if not taken.intersection(span):
            kept.append((start, period, count))
            taken.update(span)
    return sorted(kept)


def aligned_ops(repeat: RepeatedBlock, signatures: Signatures) -> list[list[Op]]:
    """Return the forward ops of each instance, equal at each position."""
    return [[op for n in nodes for op in signatures.forward(n)] for nodes in repeat.instances]
