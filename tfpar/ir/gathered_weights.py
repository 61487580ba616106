"""Ops that gather weights for their layers, and scatter gradients: how they are told from others
(see `ir.passes.gather_weights`, which writes them)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from tfpar.ir.graph import Graph, Op, Tensor
from tfpar.spec import Spec

MARK = "_tfpar_gathers"
"""The attribute by which an Identity is one of these."""

STORED_PART, GATHERED, SCATTERED = "stored_part", "gathered", "scattered"
"""What it says: a weight as it is stored, all of it, or a gradient of which each rank keeps a
part."""

WEIGHT = "_tfpar_weight"
"""The attribute of the last of these that names its weight."""


def find_gathers(graph: Graph) -> dict[Tensor, str]:
    """Find the tensors that are to be whole, each with the name of its weight."""
    names = {v.handle: v.name for v in graph.variables}
    found: dict[Tensor, str] = {}
    for op in graph.ops:
        if op.attrs.get(MARK) == GATHERED:
            tensor = op.inputs[0]
            while tensor not in names:
                tensor = tensor.op.inputs[0]
            found[op.outputs[0]] = names[tensor]
    return found


def is_prefetched(op: Op) -> bool:
    """Whether `op` gives a weight that is gathered while the group before computes."""
    return op.attrs.get(MARK) == GATHERED and bool(find_turn(op))


def find_turn(op: Op) -> frozenset[str] | None:
    """Find what the gather of a weight waits for that `op` reads or is, by names: all those of a
    group wait for the same. None for another op."""
    source = op
    while source.type == "Identity" and source.inputs:
        source, behind = source.inputs[0].op, source
        if behind.attrs.get(MARK) == STORED_PART:
            return frozenset(c.name for c in behind.control)
    return None


def runs_for_each_microbatch(op: Op) -> bool:
    """Whether `op` is one of a gather, which each microbatch does for itself."""
    return op.attrs.get(MARK) in (STORED_PART, GATHERED)


def is_scattered_gradient(op: Op) -> bool:
    """Whether `op` gives a gradient that is scattered before microbatches are added up."""
    return op.attrs.get(MARK) == SCATTERED


def gradient_of(op: Op) -> str:
    """Return the name of the weight whose gradient a scattered one is."""
    return str(op.attrs[WEIGHT])


class GatheredWeight(Protocol):
    """Specs of a weight.

    Attributes:
        spec: as it is stored.
        slots: as its optimizer slots are; None: as it is stored.
        gathered: as layers read it; None: as it is stored.
        scatters_gradient: its gradient is scattered as its slots are.
    """

    @property
    def spec(self) -> Spec | None: ...

    @property
    def slots(self) -> Spec | None: ...

    @property
    def gathered(self) -> Spec | None: ...

    @property
    def scatters_gradient(self) -> bool: ...


def gathered_tensors(graph: Graph, weights: Mapping[str, GatheredWeight]) -> dict[str, Spec]:
    """Return the specs of the tensors before and behind each gather, and of scattered gradients, by
    name.

    Args:
        weights: by name.
    """
    found: dict[str, Spec] = {}
    for tensor, name in find_gathers(graph).items():
        weight = weights.get(name)
        if weight is not None and weight.gathered is not None and weight.spec is not None:
            found[tensor.op.inputs[0].name] = weight.spec
            found[tensor.name] = weight.gathered
    for op in filter(is_scattered_gradient, graph.ops):
        weight = weights.get(gradient_of(op))
        spec = None if weight is None else weight.slots or weight.spec
        if spec is not None:
            found[op.outputs[0].name] = spec
    return found
