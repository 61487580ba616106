"""Sharding patterns of GraphNodes in TAP's SRC terms (§IV-B, §IV-D).

A pattern says whether a node's weight is Split (along a dim, over a mesh axis) or a Replica, and
the Communication that follows. All of it is read off the op rule of the op that uses the
weight: the factors of the weight's dims are what can be split; a split factor that the result
lacks leaves partial sums (an all-reduce after the op); one that another input lacks leaves
partial sums of that input's gradient (an all-reduce in the backward pass).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from tfpar.cluster.description import Cluster
from tfpar.cost.collectives import collective_seconds
from tfpar.cost.op_compute import flops
from tfpar.ir.graph import Op, Tensor, Variable, is_floating
from tfpar.ir.graph_nodes import GraphNode
from tfpar.ir.traits import READ_PART
from tfpar.propagation.factors import Split, spec_of, splits_of
from tfpar.propagation.prepared_graph import PreparedGraph
from tfpar.rules.rule import SAME, find_relabelled_inputs
from tfpar.spec import Mesh, Placement, Replicate, Shard, Spec, replicated_spec


@dataclasses.dataclass(frozen=True)
class PatternCollective:
    """Collective that a pattern brings: what is moved, when, and how long that takes."""

    phase: str
    kind: str
    axis: str
    num_bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Pattern:
    """Way to shard a node: Split or Replica of a weight, and the Communication.

    Attributes:
        axis: the mesh axis that splits the weight; empty for a Replica.
    """

    node: str
    weight: str
    placement: Placement
    axis: str = ""
    communication: tuple[PatternCollective, ...] = ()

    @property
    def seconds(self) -> float:
        """Seconds of the communication in a step."""
        return sum(c.seconds for c in self.communication)


def patterns(
    node: GraphNode,
    prepared: PreparedGraph,
    mesh: Mesh,
    cluster: Cluster,
    batch_axes: tuple[int, ...],
) -> list[Pattern]:
    """List every pattern of a node, its weights one by one; Replica first."""
    found = []
    for variable in node.weights:
        readers = list(_readers(variable, prepared, node))
        gradient = []
        axes = tuple(a for a in batch_axes if mesh.shape[a] > 1)
        if axes:
            name = " x ".join(mesh.axis_names[a] for a in axes)
            seconds = collective_seconds("all_reduce", axes, variable.num_bytes, mesh, cluster)
            gradient = [
                PatternCollective("backward", "all_reduce", name, variable.num_bytes, seconds)
            ]
        found.append(Pattern(node.name, variable.name, Replicate(), "", tuple(gradient)))
        for axis, shard in splits(variable, prepared, mesh):
            use = next(
                (u for u in readers if _factor(u, variable, shard, axis, mesh, prepared)), None
            )
            if use is None:
                continue
            factor = _factor(use, variable, shard, axis, mesh, prepared)
            assert factor is not None
            communication = _communication(use[-1], factor[0], axis, prepared, mesh, cluster)
            found.append(
                Pattern(node.name, variable.name, shard, mesh.axis_names[axis], communication)
            )
    return found


def splits(
    variable: Variable, prepared: PreparedGraph, mesh: Mesh, axes: tuple[int, ...] | None = None
) -> list[tuple[int, Shard]]:
    """List (mesh axis, shard) of each way in which some op can use the weight split.

    Args:
        axes: the mesh axes to offer; all if None.
    """
    found = []
    paths = list(_paths(variable, prepared))
    for axis in range(mesh.num_axes) if axes is None else axes:
        if mesh.shape[axis] == 1:
            continue
        for dim, size in enumerate(variable.shape):
            if size < 2:
                continue
            shard = next(
                (s for path in paths if (s := _usable(path, variable, dim, axis, mesh, prepared))),
                None,
            )
            if shard is not None:
                found.append((axis, shard))
    return found


def expert_dims(variable: Variable, prepared: PreparedGraph) -> tuple[int, ...]:
    """Return the dims that cut a weight into experts: in every product each part of it meets
    samples of its own, and gives results of its own."""
    paths, cut = list(_paths(variable, prepared)), Mesh(("experts",), (2,))
    return tuple(
        dim
        for dim, size in enumerate(variable.shape)
        if paths and size > 1 and all(_is_batched(p, variable, dim, cut, prepared) for p in paths)
    )


def _is_batched(
    path: _Path, variable: Variable, dim: int, mesh: Mesh, prepared: PreparedGraph
) -> bool:
    """Whether all operands and results of the product at the end of `path` have the factor of a dim
    of the weight."""
    split = _factor(path, variable, Shard(dim), 0, mesh, prepared)
    rule = prepared.rules[path[-1]]
    return split is not None and all(
        any(split[0] in factors for factors in dims) for dims in (*rule.inputs, *rule.outputs)
    )


# A use of a weight: the ops from its read to the product, convolution or lookup. What is only
# added or multiplied elementwise (a bias, a scale) follows the node's other weights.
_Path = tuple[Op, ...]


def _paths(variable: Variable, prepared: PreparedGraph) -> Iterator[_Path]:
    stack: list[tuple[Tensor, _Path]] = [(variable.handle, ())]
    while stack:
        tensor, path = stack.pop(0)
        for op in prepared.consumers.get(tensor, ()):
            if passes_through(op, tensor, prepared):
                stack.append((op.outputs[0], (*path, op)))
            elif flops(op, prepared.rules[op]) or op.type in READ_PART:
                yield (*path, op)


def passes_through(op: Op, tensor: Tensor, prepared: PreparedGraph) -> bool:
    """Whether `op` gives all that `tensor` holds and nothing else: a read, a cast, a reshape."""
    return (
        len(op.outputs) == 1
        and bool(find_relabelled_inputs(op, prepared.rules[op]))
        and op.outputs[0].num_elements == tensor.num_elements
        and op.type not in READ_PART
    )


def _readers(variable: Variable, prepared: PreparedGraph, node: GraphNode) -> Iterator[_Path]:
    members = set(node.ops)
    for path in _paths(variable, prepared):
        if path[-1] in members:
            yield path


def _factor(
    path: _Path, variable: Variable, shard: Shard, axis: int, mesh: Mesh, prepared: PreparedGraph
) -> Split | None:
    """The factor (and pattern) that `shard` splits in the op at the end of `path`."""
    tensor = variable.handle
    spec = _only(shard, axis, mesh)
    for op in path:
        rule = prepared.rules[op]
        at = op.inputs.index(tensor)
        split = splits_of(rule.inputs[at], spec, rule.sizes, mesh.shape)[axis]
        if split is None or split[0] < 0:
            return None
        if op is path[-1]:
            return split if rule.can_split(split[0]) and rule.takes_pattern(*split) else None
        every = splits_of(rule.inputs[at], spec, rule.sizes, mesh.shape)
        chosen = tuple(s for s in every if s is not None)
        spec = spec_of(rule.outputs[0], rule, chosen, mesh.shape, is_output=True)
        tensor = op.outputs[0]
    return None


def _usable(
    path: _Path, variable: Variable, dim: int, axis: int, mesh: Mesh, prepared: PreparedGraph
) -> Shard | None:
    """Find how `dim` of the weight is split over `axis` for the op at the end of `path`.

    In contiguous blocks; where the result is reshaped into several dims (queries, keys and values
    of one matrix) and the axis does not divide the first of them, in blocks of a later one that it
    divides (Rhino §4.1's strides).
    """
    plain = Shard(dim)
    split = _factor(path, variable, plain, axis, mesh, prepared)
    if split is None:
        return None
    stride = None
    if prepared.rules[path[-1]].sizes[split[0]] == variable.shape[dim]:
        stride = _stride(path[-1], split[0], mesh.shape[axis], prepared)
    if stride is not None:
        strided = Shard(dim, stride)
        if _factor(path, variable, strided, axis, mesh, prepared) is not None:
            return strided
    return plain


def _stride(op: Op, factor: int, parts: int, prepared: PreparedGraph) -> int | None:
    """The stride at which to cut a factor of `op`'s result that is reshaped further on."""
    rule = prepared.rules[op]
    tensor = op.outputs[0]
    dim = next((d for d, dims in enumerate(rule.outputs[0]) if dims == (factor,)), None)
    size = rule.sizes[factor]
    for _ in range(4):
        readers = [r for r in prepared.consumers.get(tensor, ()) if r.outputs]
        if dim is None or not readers:
            return None
        reader = readers[0]
        rule = prepared.rules[reader]
        dims = rule.inputs[reader.inputs.index(tensor)]
        if len(dims[dim]) > 1:
            inner = size
            for part in dims[dim]:
                inner //= rule.sizes[part]
                if rule.sizes[part] % parts == 0:
                    return None if inner * rule.sizes[part] == size else inner * rule.sizes[part]
            return None
        if not dims[dim]:
            return None
        (factor,) = dims[dim]
        tensor = reader.outputs[0]
        dim = next((d for d, out in enumerate(rule.outputs[0]) if out == (factor,)), None)
    return None


def _only(placement: Placement, axis: int, mesh: Mesh) -> Spec:
    spec = list(replicated_spec(mesh.num_axes))
    spec[axis] = placement
    return tuple(spec)


def _communication(
    op: Op, factor: int, axis: int, prepared: PreparedGraph, mesh: Mesh, cluster: Cluster
) -> tuple[PatternCollective, ...]:
    rule = prepared.rules[op]
    name = mesh.axis_names[axis]

    def all_reduce(phase: str, tensor: Tensor) -> PatternCollective:
        seconds = collective_seconds("all_reduce", (axis,), tensor.num_bytes, mesh, cluster)
        return PatternCollective(phase, "all_reduce", name, tensor.num_bytes, seconds)

    found = []
    if rule.reduce.get(factor, SAME) != SAME or factor in rule.expand:
        found += [
            all_reduce("forward", t)
            for t, dims in zip(op.outputs, rule.outputs, strict=True)
            if not rule.has_factor(dims, factor)
        ]
    for tensor, dims in zip(op.inputs, rule.inputs, strict=True):
        lacks = is_floating(tensor.dtype) and not rule.has_factor(dims, factor)
        if lacks and tensor.num_elements > 1:
            found.append(all_reduce("backward", tensor))
    return tuple(found)
