"""Unequal shares along one axis, for a graph that was partitioned evenly.

Specs and decisions stay: a spec says which dim an axis splits, and the mesh how many entries each
rank gets. That is so as long as all that the axis splits is cut in proportion: the batch, and what
has it as a factor. A graph of which the axis splits something else (a weight, a feature dim that is
scattered) is refused.
"""

from __future__ import annotations

import dataclasses

from tfpar.ir.graph import Shape
from tfpar.propagation.partitioned_graph import Decision, PartitionedGraph
from tfpar.rules.rule import OpRule
from tfpar.spec import Shard, Spec, UnevenMesh


class UnevenSplitError(Exception):
    """The uneven axis splits something that is not cut in proportion: knows its name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def check_shares(partitioned: PartitionedGraph, mesh: UnevenMesh) -> None:
    """Check that `partitioned`, a graph on the even mesh, may run on the uneven one.

    Raises:
        UnevenSplitError: it may not.
    """
    for variable, spec in partitioned.variable_specs.items():
        if isinstance(spec[mesh.uneven_axis], Shard):  # all batches share one layout
            raise UnevenSplitError(variable.name)
    for reshard in partitioned.reshards:
        for step in reshard.steps(partitioned.mesh):
            _check(reshard.tensor.name, reshard.tensor.shape, step.before, mesh)
            _check(reshard.tensor.name, reshard.tensor.shape, step.after, mesh)
    for op, decision in partitioned.decisions.items():
        strategy = decision.strategy
        for tensor, spec in (
            *zip(op.inputs, strategy.in_specs, strict=True),
            *zip(op.outputs, strategy.out_specs, strict=True),
        ):
            _check(tensor.name, tensor.shape, spec, mesh)
        _check_factor(op.name, partitioned.prepared.rules[op], decision, mesh)
        for inner in (decision.expansion, *decision.bodies.values()):
            if inner is not None:
                check_shares(inner, mesh)
    for tensor, spec in partitioned.specs.items():
        _check(tensor.name, tensor.shape, spec, mesh)


def with_uneven_mesh(partitioned: PartitionedGraph, mesh: UnevenMesh) -> PartitionedGraph:
    """Return the same graph on `mesh`, with the decompositions and bodies of its ops."""
    decisions = {}
    for op, decision in partitioned.decisions.items():
        if decision.expansion is not None or decision.bodies:
            expansion = decision.expansion
            decision = dataclasses.replace(
                decision,
                expansion=None if expansion is None else with_uneven_mesh(expansion, mesh),
                bodies={
                    name: with_uneven_mesh(body, mesh) for name, body in decision.bodies.items()
                },
            )
        decisions[op] = decision
    return dataclasses.replace(partitioned, mesh=mesh, decisions=decisions)


def with_own_share(partitioned: PartitionedGraph, mesh: UnevenMesh) -> PartitionedGraph:
    """Return `partitioned` as one rank sees it that has its share.

    Args:
        mesh: seen from that rank; the graph may have further axes behind, of the parts of a rank.

    Raises:
        UnevenSplitError: the graph does not split so.
    """
    mesh = mesh.within(partitioned.mesh)
    check_shares(partitioned, mesh)
    return with_uneven_mesh(partitioned, mesh)


def _check(name: str, shape: Shape, spec: Spec, mesh: UnevenMesh) -> None:
    """Raise UnevenSplitError unless ranks that differ in shape only differ in how many samples."""
    uneven = spec[mesh.uneven_axis]
    if not isinstance(uneven, Shard):
        return
    length = None if shape is None else shape[uneven.dim]
    if length is None:
        raise UnevenSplitError(name)
    for axis, placement in enumerate(spec[: mesh.uneven_axis]):
        if isinstance(placement, Shard) and placement.dim == uneven.dim:
            length = placement.local_length(length, mesh.shape[axis])
    outer, split, unit = uneven.view(length)
    if not mesh.proportional(mesh.uneven_axis, split):
        raise UnevenSplitError(name)
    lengths = [
        outer * unit * mesh.block(mesh.uneven_axis, split, at)[1] for at in range(len(mesh.shares))
    ]
    for axis in range(mesh.uneven_axis + 1, mesh.num_axes):
        placement = spec[axis]
        if not isinstance(placement, Shard) or placement.dim != uneven.dim:
            continue
        # Samples are the major part of a dim, or its strides would depend on how many there are.
        if placement.stride is not None and outer > 1:
            raise UnevenSplitError(name)
        parts = mesh.shape[axis]
        if not all(placement.fits(n) and placement.is_even(n, parts) for n in lengths):
            raise UnevenSplitError(name)
        lengths = [placement.local_length(n, parts) for n in lengths]


def _check_factor(name: str, rule: OpRule, decision: Decision, mesh: UnevenMesh) -> None:
    """Raise UnevenSplitError unless the factor that the uneven axis splits is cut in proportion."""
    splits = decision.strategy.splits
    factor, pattern = splits[mesh.uneven_axis]
    if factor < 0:
        return
    size = rule.sizes[factor]
    for axis, (other, before) in enumerate(splits[: mesh.uneven_axis]):
        if other == factor:
            size = Shard(0, *before).local_length(size, mesh.shape[axis])
    if not mesh.proportional(mesh.uneven_axis, Shard(0, *pattern).view(size)[1]):
        raise UnevenSplitError(name)
