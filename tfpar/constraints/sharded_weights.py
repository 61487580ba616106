"""Resolution of `fsdp` constraints: the specs of weights of which ranks store a part each (ZeRO:
Rajbhandari et al., 2020; FSDP)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from tfpar.constraints.constraint_types import Constraint, FullyShard
from tfpar.constraints.patterns import matches_nothing
from tfpar.constraints.variables import Resolution, batch_axes, check_axes, matches
from tfpar.ir.graph import Variable
from tfpar.ir.names import user_names
from tfpar.spec import Mesh, Replicate, Shard, Spec, SpecError, local_shape, replicated_spec


@dataclasses.dataclass(frozen=True)
class ShardedWeight:
    """Specs of a weight that ranks store in parts.

    Attributes:
        spec: as it is stored.
        slots: as its optimizer slots are; None: as it is itself.
        gathered: as the layers read it; None: as it is stored.
        keep_gathered: the backward pass reads what the forward pass gathered.
        scatters_gradient: gradients are scattered before those of microbatches are added up.
        why: the constraints that say so.
    """

    spec: Spec
    slots: Spec | None
    gathered: Spec | None
    keep_gathered: bool
    scatters_gradient: bool
    why: str


def resolve_fsdp(
    constraints: Sequence[Constraint],
    variables: Sequence[Variable],
    mesh: Mesh,
    resolved: Mapping[str, Resolution],
    *,
    must_match: bool = True,
) -> dict[str, ShardedWeight]:
    """Resolve the specs of the weights that `fsdp` constraints match, by name.

    Args:
        resolved: of all other constraints, see `resolve_variables`; a weight that they do not
            mention is whole along the other axes.
        must_match: False lets constraints match nothing.

    Raises:
        SpecError: a constraint that matches no weight; an axis that the mesh lacks, that does not
            split the batch, or along which a weight is split already.
    """
    asked = [c for c in constraints if isinstance(c, FullyShard)]
    check_axes(asked, mesh)
    for constraint in asked:
        if constraint.axis not in batch_axes(constraints, mesh):
            raise SpecError(
                f"{constraint}: the batch is not split over {constraint.axis!r}, so that its ranks "
                f"would all compute the same. Name that axis in tap.batch(...), too."
            )
    weights = [v for v in variables if v.trainable]
    found: dict[str, ShardedWeight] = {}
    for constraint in asked:
        matching = [v for v in weights if matches(constraint, user_names(v.name, v.place))]
        if must_match and not matching:
            names = [v.name for v in weights]
            raise SpecError(matches_nothing(constraint, constraint.pattern, names, "weight"))
        for weight in matching:
            before = found.get(weight.name) or _unsharded(weight, mesh, resolved)
            found[weight.name] = _sharded(constraint, weight, mesh, before)
    return found


def _unsharded(weight: Variable, mesh: Mesh, resolved: Mapping[str, Resolution]) -> ShardedWeight:
    laid = resolved.get(weight.name)
    if laid is None:
        return ShardedWeight(replicated_spec(mesh.num_axes), None, None, False, False, "")
    return ShardedWeight(laid.spec, None, None, False, False, laid.reason)


def _sharded(
    constraint: FullyShard, weight: Variable, mesh: Mesh, before: ShardedWeight
) -> ShardedWeight:
    """`before`, sharded as a constraint says."""
    axis = mesh.axis(constraint.axis)
    stored = before.slots or before.spec
    if not isinstance(stored[axis], Replicate):
        raise SpecError(
            f"Weight {weight.name!r} of shape {tuple(weight.shape)}: {before.why} and "
            f"{constraint} both split it along mesh axis {constraint.axis!r}. Narrow the pattern "
            f"of one of them, or use another mesh axis."
        )
    why = "; ".join(filter(None, [before.why, str(constraint)]))
    split = split_weight(weight.shape, stored, axis, mesh)
    if split == stored:  # too small
        return dataclasses.replace(before, why=why)
    scatters = before.scatters_gradient or constraint.stage > 1
    changed = dataclasses.replace(before, scatters_gradient=scatters, why=why)
    if constraint.stage < 3:
        return dataclasses.replace(changed, slots=split)
    spec = slots = split_weight(weight.shape, before.spec, axis, mesh)
    for other, placement in enumerate(before.slots or ()):
        if placement != before.spec[other]:
            slots = split_weight(weight.shape, slots, other, mesh)
    return dataclasses.replace(
        changed,
        spec=spec,
        slots=None if slots == spec else slots,
        gathered=before.gathered or before.spec,
        keep_gathered=before.keep_gathered or constraint.keep,
    )


def split_weight(shape: Sequence[int], spec: Spec, axis: int, mesh: Mesh) -> Spec:
    """Split a weight along an axis along which it is whole: in the longest dim that divides evenly
    and is not split yet; or else may be. One whose dims are all shorter than the axis stays as it
    is."""
    parts = mesh.shape[axis]
    taken = {p.dim for p in spec if isinstance(p, Shard)}
    local = local_shape(tuple(shape), spec, mesh)
    dims = [dim for dim, length in enumerate(local) if length >= parts > 1]
    if not dims:
        return spec
    best = min(dims, key=lambda d: (local[d] % parts > 0, d in taken, -local[d]))
    return (*spec[:axis], Shard(best), *spec[axis + 1 :])
