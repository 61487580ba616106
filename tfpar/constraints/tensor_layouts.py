"""Layouts that a model gives its own tensors, as `keras.distribution.distribute_tensor` does."""

from __future__ import annotations

import re

from tfpar.constraints.constraint_types import LayoutOutput
from tfpar.ir.graph import Graph, Op
from tfpar.spec import SpecError

LAYOUT = "_tfpar_layout"
"""The attribute of an op: the mesh axis of each dim of its output, `data,,model`."""


def collect_tensor_layouts(graph: Graph) -> tuple[LayoutOutput, ...]:
    """Collect the constraints that are noted on the ops of a step.

    Raises:
        SpecError: one is inside of a loop or branch, where no spec can be fixed; names it.
    """
    for function in graph.functions.values():
        for op in function.ops:
            if LAYOUT in op.attrs:
                raise SpecError(
                    f"{op.name!r} lays out a tensor inside of a loop or branch, where none can be "
                    f"fixed: call distribute_tensor on what goes in, or comes out."
                )
    return tuple(_noted(op) for op in graph.ops if LAYOUT in op.attrs)


def _noted(op: Op) -> LayoutOutput:
    axes = op.attrs[LAYOUT].decode().split(",")
    return LayoutOutput(re.escape(op.name), tuple(axis or None for axis in axes))
