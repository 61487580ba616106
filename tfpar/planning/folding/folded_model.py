"""Folded model: the folded graph with its roles and GraphNodes, the same for every mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping

from tfpar.ir.constants import Constants
from tfpar.ir.graph import Op, Tensor
from tfpar.ir.graph_nodes import NodeGraph, cluster
from tfpar.ir.roles import Roles
from tfpar.ir.shared_subgraphs import Signatures, prune_graph, repeated_blocks
from tfpar.planning.folding.fold import FoldedGraph, fold
from tfpar.planning.intra_op.incremental.pricing_counters import PricingCounters
from tfpar.planning.meshes import LogicalMesh
from tfpar.planning.problem import Problem
from tfpar.propagation.engine import propagate
from tfpar.propagation.partitioned_graph import Anchors, Decision, PartitionedGraph
from tfpar.propagation.prepared_graph import PreparedGraph, prepare
from tfpar.spec import Mesh, Shard, Spec, replicated_spec


@dataclasses.dataclass
class TapStatistics(PricingCounters):
    """Counters of TAP's search; see `benchmarks/search.py`.

    Attributes:
        ops, nodes, weighted_nodes, subgraphs: of the model.
        candidates, valid: plans priced, and those of them that hold together.
    """

    ops: int = 0
    nodes: int = 0
    weighted_nodes: int = 0
    subgraphs: int = 0
    candidates: int = 0
    valid: int = 0


def folded_model(problem: Problem, min_duplicate: int) -> FoldedModel:
    """Return the folded model of a problem: made once for each graph, and counting for each
    problem."""
    own = problem.memo.of(FoldedModels)
    if min_duplicate not in own:
        priced = problem.step.zero_cost_ops, problem.step.compression, problem.step.jit_compile
        graph_key = problem.step.graph, *priced, min_duplicate
        made = problem.step.graph_memo.of(FoldedGraphs)
        if graph_key not in made:
            made[graph_key] = FoldedModel.of(problem, min_duplicate)
        model = made[graph_key]
        counts = dataclasses.replace(
            model.statistics, candidates=0, valid=0, **vars(PricingCounters())
        )
        own[min_duplicate] = dataclasses.replace(model, statistics=counts)
    return own[min_duplicate]


class FoldedModels(dict[int, "FoldedModel"]):
    """Folded models of a problem, by the least number of duplicates that are folded."""


class FoldedGraphs(dict[tuple[Hashable, ...], "FoldedModel"]):
    """Folded models by graph and by what else they depend on."""


@dataclasses.dataclass(frozen=True, eq=False)
class FoldedModel:
    """Folded graph with its roles and GraphNodes: all that a search needs and no mesh changes."""

    folded: FoldedGraph
    prepared: PreparedGraph
    roles: Roles
    nodes: NodeGraph
    statistics: TapStatistics
    _data_parallel: dict[tuple[int, frozenset[Op]], Mapping[Op, Decision]] = dataclasses.field(
        default_factory=dict
    )

    @classmethod
    def of(cls, problem: Problem, min_duplicate: int) -> FoldedModel:
        graph = problem.step.graph
        roles = Roles.of(graph, jit_compile=problem.step.jit_compile)
        nodes = cluster(graph, roles)
        signatures = Signatures(Constants(graph), roles)
        shared = prune_graph(nodes, signatures, min_duplicate)
        repeats = repeated_blocks(nodes, shared, signatures, min_duplicate)
        folded = fold(graph, repeats, signatures)
        times = dict(folded.times)
        times.update(
            {folded.copies[op]: 0 for op in problem.step.zero_cost_ops if op in folded.copies}
        )
        prepared = prepare(folded.graph)
        folded_roles = Roles.of(prepared.graph, times=times, compression=problem.step.compression)
        if roles.kernels is not None:  # of the model: where blocks are left out, others read
            kernels = {folded.copies.get(op, op): part for op, part in roles.kernels.items()}
            folded_roles = dataclasses.replace(folded_roles, kernels=kernels)
        statistics = TapStatistics(
            ops=len(graph.ops),
            nodes=len(nodes.nodes),
            weighted_nodes=len(nodes.weighted()),
            subgraphs=len(repeats),
        )
        return cls(
            folded, prepared, folded_roles, cluster(prepared.graph, folded_roles), statistics
        )

    def anchors(
        self, problem: Problem, logical: LogicalMesh, variables: Mapping[str, Spec]
    ) -> Anchors:
        """Return the anchors on the folded graph of a plan on `logical` with these specs of
        `variables`."""
        graph, batched = self.prepared.graph, self.batched(problem)
        return Anchors(
            variables=variables,
            inputs=[logical.input_spec(t in batched) for t in graph.inputs],
            tensors={name: given.spec for name, given in problem.given.tensors.items()},
            outputs=[replicated_spec(logical.mesh.num_axes)] * len(graph.outputs),
        )

    def batched(self, problem: Problem) -> frozenset[Tensor]:
        """Return the inputs of the folded graph whose first dim is the batch."""
        copies = self.folded.copies
        return frozenset(
            copies[t.op].outputs[t.index] for t in problem.step.batched if t.op in copies
        )

    def on_one_device(self) -> PartitionedGraph:
        """Return the folded graph with nothing split."""
        graph, whole = self.prepared.graph, replicated_spec(1)
        anchors = Anchors(
            variables={v.name: whole for v in graph.variables},
            inputs=[whole] * len(graph.inputs),
            outputs=[whole] * len(graph.outputs),
        )
        return propagate(self.prepared, Mesh.of([1]), anchors)

    def data_parallel_anchors(self, fed: frozenset[Op]) -> Anchors:
        """Return the anchors of data parallelism on one axis: `fed` inputs are split, all else is
        whole."""
        graph, whole = self.prepared.graph, replicated_spec(1)
        return Anchors(
            variables={v.name: whole for v in graph.variables},
            inputs=[(Shard(0),) if t.op in fed else whole for t in graph.inputs],
            outputs=[whole] * len(graph.outputs),
        )

    def data_parallel(self, parts: int, fed: frozenset[Op]) -> Mapping[Op, Decision]:
        """Return the decisions of all ops where `fed` inputs, and only these, are split over
        `parts` ranks."""
        key = parts, fed
        if key not in self._data_parallel:
            anchors = self.data_parallel_anchors(fed)
            mesh = Mesh(("data",), (parts,))
            self._data_parallel[key] = propagate(self.prepared, mesh, anchors).decisions
        return self._data_parallel[key]
