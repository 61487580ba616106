"""What a search knows of a model whatever the layout: the folded graph and its roles and nodes."""

from __future__ import annotations

import dataclasses

from tfpar.ir.constants import Constants
from tfpar.ir.roles import Roles
from tfpar.propagation.engine import propagate
from tfpar.propagation.partitioned import Anchors, PartitionedGraph
from tfpar.propagation.prepared import PreparedGraph, prepare
from tfpar.search.fold import Folded, fold
from tfpar.search.graph_nodes import NodeGraph, cluster
from tfpar.search.problem import Problem
from tfpar.search.shared import Signatures, families, prune_graph
from tfpar.spec import Mesh, replicated


@dataclasses.dataclass
class Statistics:
    """What a search did; see `benchmarks/search.py`."""

    ops: int = 0
    nodes: int = 0
    weighted_nodes: int = 0
    subgraphs: int = 0
    candidates: int = 0
    valid: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class FoldedModel:
    """What does not depend on the layout."""

    folded: Folded
    prepared: PreparedGraph
    roles: Roles
    nodes: NodeGraph
    statistics: Statistics

    @classmethod
    def of(cls, problem: Problem, min_duplicate: int) -> FoldedModel:
        graph = problem.graph
        roles = Roles.of(graph)
        nodes = cluster(graph, roles)
        signatures = Signatures(Constants(graph), roles)
        shared = prune_graph(nodes, signatures, min_duplicate)
        repeats = families(nodes, shared, signatures, min_duplicate)
        folded = fold(graph, repeats, signatures)
        times = dict(folded.times)
        times.update({folded.copies[op]: 0 for op in problem.stand_ins if op in folded.copies})
        prepared = prepare(folded.graph)
        folded_roles = Roles.of(prepared.graph, times=times, compression=problem.compression)
        statistics = Statistics(
            len(graph.ops), len(nodes.nodes), len(nodes.weighted()), len(repeats)
        )
        return cls(
            folded, prepared, folded_roles, cluster(prepared.graph, folded_roles), statistics
        )

    def on_one_device(self) -> PartitionedGraph:
        """The folded graph with nothing split."""
        graph, whole = self.prepared.graph, replicated(1)
        anchors = Anchors(
            variables={v.name: whole for v in graph.variables},
            inputs=[whole] * len(graph.inputs),
            outputs=[whole] * len(graph.outputs),
        )
        return propagate(self.prepared, Mesh.of([1]), anchors)
