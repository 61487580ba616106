"""A partitioned graph as text: the graph, with how each op runs as a comment."""

from __future__ import annotations

from tfpar.ir.graph import Op
from tfpar.ir.text import format_graph
from tfpar.propagation.partitioned_graph import PartitionedGraph
from tfpar.spec import Spec, format_spec


def format_partitioned(partitioned: PartitionedGraph) -> str:
    """Format the graph as text, which reads back as such (`tfpar.ir.text`).

    Behind an op stand the specs in which it reads its inputs and makes its outputs, and what these
    are kept as where that is something else: `// S(0),R; R,S(1) -> S(0),S(1)`.
    """
    notes = {op: _note(partitioned, op) for op in partitioned.graph.ops}
    return f"// on the mesh {partitioned.mesh}\n{format_graph(partitioned.graph, notes)}"


def _note(partitioned: PartitionedGraph, op: Op) -> str:
    kept = [partitioned.specs[t] for t in op.outputs if t in partitioned.specs]
    decision = partitioned.decisions.get(op)
    if decision is None:  # an input or a variable
        return _listed(kept)
    strategy = decision.strategy
    made = list(strategy.out_specs)
    text = f"{_listed(strategy.in_specs)} -> {_listed(made)}" if op.inputs else _listed(made)
    return text if kept == made else f"{text}, kept as {_listed(kept)}"


def _listed(specs: list[Spec] | tuple[Spec, ...]) -> str:
    return "; ".join(map(format_spec, specs)) or "nothing"
