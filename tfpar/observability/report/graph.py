"""A plan as a `networkx.DiGraph`: GraphNodes, and the tensors that flow between them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import networkx as nx

from tfpar.observability.report.data.schema import LayerSummary, Report
from tfpar.observability.report.layer_rows import group_by_layer
from tfpar.spec import PlanError


def plan_graph(report: Report) -> nx.DiGraph:
    """The graph of `Plan.graph`.

    Raises:
        PlanError: it is not known: the plan was saved without.
    """
    if not report.layers:
        raise PlanError(
            "This plan holds no graph: its file keeps placements alone. Save the plan of "
            "tap.plan(build, batch, mesh), or tap.plan_of(model) after the model ran a step."
        )
    moved = group_by_layer(report.collectives)
    specs: dict[str, dict[str, str | None]] = {}
    device_bytes: Counter[str] = Counter()
    for variable in report.variables:
        if variable.layer is not None and variable.kind == "weight":
            specs.setdefault(variable.layer, {})[variable.path] = variable.spec
            device_bytes[variable.layer] += variable.device_bytes or 0
    mesh = " x ".join(f"{axis.name}={axis.size}" for axis in report.facts.mesh)
    graph = nx.DiGraph(mesh=mesh)
    for layer in report.layers:
        counts: Counter[str] = Counter()
        for one in moved.get(layer.path, ()):
            counts[f"{one.kind} over {' x '.join(one.axes)}"] += one.count
        priced = {} if report.machines is None else {"seconds": layer.total_s}
        graph.add_node(
            layer.path,
            kind=layer.kind,
            ops=layer.ops,
            flops=layer.flops,
            weights=specs.get(layer.path, {}),
            weight_bytes=layer.weight_bytes,
            device_weight_bytes=device_bytes[layer.path],
            **_block(layer),
            **priced,
            collectives=dict(counts),
        )
    for flow in report.flows:
        if not graph.has_edge(flow.source, flow.target):
            graph.add_edge(flow.source, flow.target, tensors=[], bytes=0)
        edge = graph.edges[flow.source, flow.target]
        edge["bytes"] += flow.num_bytes
        edge["tensors"].append(
            {
                "name": flow.tensor,
                "shape": list(flow.shape),
                "dtype": flow.dtype,
                "bytes": flow.num_bytes,
                "spec": flow.spec,
                "read_as": list(flow.read_as),
            }
        )
    return graph


def _block(layer: LayerSummary) -> dict[str, Any]:
    if layer.repeat is None:
        return {}
    return {"block": layer.repeat.block, "instance": layer.repeat.instance}
