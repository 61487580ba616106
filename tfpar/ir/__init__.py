"""The graph that everything between capture and rewrite works on. Free of TensorFlow."""

from tfpar.ir.graph import (
    DType,
    FunctionRef,
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

__all__ = [
    "DType",
    "FunctionRef",
    "Graph",
    "Op",
    "Shape",
    "ShapeAttr",
    "Tensor",
    "UnknownShape",
    "Variable",
    "freeze",
    "is_floating",
    "is_numeric",
    "itemsize",
    "walk_functions",
]
