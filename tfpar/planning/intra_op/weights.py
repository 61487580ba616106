"""Weight groups that a search decides, and the spec options of each."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Sequence

from tfpar.cost.patterns import expert_dims, splits
from tfpar.ir.graph import Variable
from tfpar.planning.folding.folded_model import FoldedModel
from tfpar.planning.meshes import LogicalMesh
from tfpar.planning.problem import Problem
from tfpar.spec import Placement, Shard, Spec, replicated_spec


@dataclasses.dataclass(eq=False)
class WeightGroup:
    """Weights with one spec: those at one place of a block's instances.

    Attributes:
        options: the first one is whole, but for experts.
    """

    variables: Sequence[Variable]
    options: Sequence[Spec]
    chosen: int = 0

    @property
    def name(self) -> str:
        return self.variables[0].name


def weight_groups(problem: Problem, model: FoldedModel, logical: LogicalMesh) -> list[WeightGroup]:
    """Return the weights to decide on `logical`, in the order of the graph: those with several dims
    that some op can use split and that are not given."""
    known = {v.name: (i, v) for i, v in enumerate(model.prepared.graph.variables)}
    groups = []
    for members in model.folded.groups:
        variables = [
            known[v.name][1]
            for v in members
            if v.name not in problem.given.variables and v.trainable
        ]
        if not variables or len(variables[0].shape) < 2 or not logical.model_axes:
            continue
        options = weight_options(variables[0], model, logical)
        if options != [replicated_spec(logical.mesh.num_axes)]:
            groups.append(WeightGroup(variables, options))
    return sorted(groups, key=lambda group: known[group.name][0])


def weight_options(variable: Variable, model: FoldedModel, logical: LogicalMesh) -> list[Spec]:
    """Whole; split along one model axis, unless each of several has to be used; and row- and
    column-first: one dim along one axis and another along the next (ATP §3.2). Weights of experts
    are split so beside a split over an axis for experts, which they have in any case: else the mesh
    without it is the same."""
    whole = replicated_spec(logical.mesh.num_axes)
    found = splits(variable, model.prepared, logical.mesh, logical.model_axes)
    options = [whole]
    if len(logical.used_axes) < 2:
        options += [_split(whole, one) for one in found]
    options += [
        _split(whole, one, other)
        for one, other in itertools.product(found, found)
        if one[0] < other[0] and one[1].dim != other[1].dim
    ]
    if not logical.expert_axes:
        return options
    dims = expert_dims(variable, model.prepared)
    spread = [
        (axis, shard)
        for axis, shard in splits(variable, model.prepared, logical.mesh, logical.expert_axes)
        if shard.dim in dims and variable.shape[shard.dim] % logical.mesh.shape[axis] == 0
    ]
    by_expert = [
        _split(option, (axis, shard))
        for (axis, shard), option in itertools.product(spread, options)
        if option[axis] == whole[axis] and not _splits_dim(option, shard.dim)
    ]
    return by_expert or options


def _split(spec: Spec, *splits: tuple[int, Shard]) -> Spec:
    """Return `spec`, split along these axes too."""
    placements: list[Placement] = list(spec)
    for axis, shard in splits:
        placements[axis] = shard
    return tuple(placements)


def _splits_dim(spec: Spec, dim: int) -> bool:
    return any(isinstance(placement, Shard) and placement.dim == dim for placement in spec)


def expert_counts(model: FoldedModel) -> list[int]:
    """Return the numbers of experts that layers of the model have, each once; none without
    experts."""
    weights = [group[0] for group in model.folded.groups if group[0].trainable]
    return sorted(
        {weight.shape[dim] for weight in weights for dim in expert_dims(weight, model.prepared)}
    )


def resembling(spec: Spec | None, group: WeightGroup) -> int | None:
    """Find the option of `group` that resembles `spec` on another mesh, if there is one.

    What is split along some axes there may be split along one more here: along the first of them as
    there, along the last in the largest other dim, so that Megatron's column and row splits become
    column- and row-first ones.
    """
    if spec is None:
        return None
    if spec in group.options:
        return group.options.index(spec)
    dims = [p.dim for p in spec if isinstance(p, Shard)]
    shape = group.variables[0].shape
    found = []
    for at, option in enumerate(group.options):
        laid = [p.dim for p in option if isinstance(p, Shard)]
        if laid[:1] == dims[:1]:
            alike = len(os.path.commonprefix([laid, dims]))
            found.append((-alike, -sum(shape[dim] for dim in laid[alike:]), at))
    return min(found)[-1] if found else None
