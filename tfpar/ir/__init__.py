"""The graph that everything between capture and rewrite works on. Free of TensorFlow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfpar.ir.fingerprint import fingerprint
from tfpar.ir.graph import (
    DType,
    FunctionRef,
    Gradient,
    Graph,
    Op,
    Shape,
    ShapeAttr,
    Tensor,
    UnknownShape,
    Variable,
    freeze,
    is_floating,
    is_numeric,
    itemsize,
    walk_functions,
)
from tfpar.ir.planning_graph import planning_graph
from tfpar.lazy import lazy_exports

if TYPE_CHECKING:
    from tfpar.ir import traits
    from tfpar.ir.builder import GraphBuilder
    from tfpar.ir.constants import Constants
    from tfpar.ir.graph_nodes import GraphNode, NodeGraph
    from tfpar.ir.order import sort_topologically
    from tfpar.ir.passes.block_sums import BLOCK_SUM
    from tfpar.ir.passes.fuse_attention import fuse_attention
    from tfpar.ir.passes.recompute import is_recomputed
    from tfpar.ir.roles import BACKWARD, FORWARD, PHASES, UPDATE, Roles, When
    from tfpar.ir.shared_subgraphs import RepeatedBlock
    from tfpar.ir.step import ModelLayer, StepGraph
    from tfpar.ir.text import format_graph, format_step, parse_graph, parse_step

__all__ = [
    "BACKWARD",
    "BLOCK_SUM",
    "FORWARD",
    "PHASES",
    "UPDATE",
    "Constants",
    "DType",
    "FunctionRef",
    "Gradient",
    "Graph",
    "GraphBuilder",
    "GraphNode",
    "ModelLayer",
    "NodeGraph",
    "Op",
    "RepeatedBlock",
    "Roles",
    "Shape",
    "ShapeAttr",
    "StepGraph",
    "Tensor",
    "UnknownShape",
    "Variable",
    "When",
    "fingerprint",
    "format_graph",
    "format_step",
    "freeze",
    "fuse_attention",
    "is_floating",
    "is_numeric",
    "is_recomputed",
    "itemsize",
    "parse_graph",
    "parse_step",
    "planning_graph",
    "sort_topologically",
    "traits",
    "walk_functions",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "tfpar.ir.builder": ["GraphBuilder"],
        "tfpar.ir.constants": ["Constants"],
        "tfpar.ir.graph_nodes": ["GraphNode", "NodeGraph"],
        "tfpar.ir.step": ["ModelLayer", "StepGraph"],
        "tfpar.ir.order": ["sort_topologically"],
        "tfpar.ir.passes.block_sums": ["BLOCK_SUM"],
        "tfpar.ir.passes.fuse_attention": ["fuse_attention"],
        "tfpar.ir.passes.recompute": ["is_recomputed"],
        "tfpar.ir.roles": ["BACKWARD", "FORWARD", "PHASES", "Roles", "UPDATE", "When"],
        "tfpar.ir.shared_subgraphs": ["RepeatedBlock"],
        "tfpar.ir.text": ["format_graph", "format_step", "parse_graph", "parse_step"],
    },
)
