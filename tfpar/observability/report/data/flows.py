"""Flows between layers in the forward pass, and the parts of the step's inputs that ranks get."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tfpar.ir.graph import Tensor
from tfpar.ir.graph_nodes import GraphNode, NodeGraph
from tfpar.ir.roles import FORWARD, Roles
from tfpar.observability.report.data.schema import FlowSummary, Input
from tfpar.observability.report.variables import placement_text
from tfpar.propagation.partitioned_graph import PartitionedGraph
from tfpar.spec import Mesh, Spec, format_spec


def flows_of(
    partitioned: PartitionedGraph,
    nodes: NodeGraph,
    roles: Roles,
    paths: Mapping[GraphNode, str],
) -> Iterator[FlowSummary]:
    """The tensors, handles of variables aside, that a layer reads of another going forward."""
    for reader in nodes.nodes:
        wanted: dict[Tensor, dict[str, None]] = {}
        for op in reader.ops:
            if roles.phase[op] != FORWARD or op not in partitioned.decisions:
                continue
            read_as = partitioned.decisions[op].strategy.in_specs
            for tensor, spec in zip(op.inputs, read_as, strict=True):
                source = nodes.node_of.get(tensor.op)
                if source not in (None, reader) and tensor.dtype != "resource":
                    wanted.setdefault(tensor, {})[format_spec(spec)] = None
        for tensor, specs in wanted.items():
            yield FlowSummary(
                source=paths[nodes.node_of[tensor.op]],
                target=paths[reader],
                tensor=tensor.name,
                shape=tuple(tensor.shape or ()),
                dtype=str(tensor.dtype),
                num_bytes=tensor.num_bytes,
                spec=format_spec(partitioned.specs[tensor]),
                read_as=tuple(specs),
            )


def inputs_of(partitioned: PartitionedGraph) -> Iterator[Input]:
    """Yield the step's inputs, each with what a rank is given of it and what its ops take of that.

    Where ops are split one by one, "the batch is not split" says little: one input may be needed
    whole by each rank, and another only in part.
    """
    mesh, consumers = partitioned.mesh, partitioned.prepared.consumers
    for tensor in partitioned.graph.inputs:
        if not tensor.shape or mesh.size == 1:
            continue
        taken: dict[Spec, None] = {}
        for op in consumers.get(tensor, ()):
            specs = partitioned.decisions[op].strategy.in_specs
            taken.update((s, None) for t, s in zip(op.inputs, specs, strict=True) if t is tensor)
        given = _given(partitioned.specs[tensor], mesh)
        used = "; ".join(dict.fromkeys(_given(spec, mesh) for spec in taken)) or "nothing"
        yield Input(tensor.op.name, tuple(tensor.shape), given, used)


def _given(spec: Spec, mesh: Mesh) -> str:
    text = placement_text(spec, mesh)
    return "all of it" if text == "replicated" else text
