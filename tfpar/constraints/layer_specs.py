"""Specs that layers give their own weights: ATP's `spec=[Shard(1), Shard(0)]` (§4.2, Fig. 9)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from tfpar.constraints.constraint_types import VariableConstraint
from tfpar.spec import (
    ArgumentError,
    Mesh,
    Placement,
    Replicate,
    Shard,
    SpecError,
    format_spec,
    parse_placement,
)
from tfpar.spec.arguments import argument_error, check_list

_MARK = "_tfpar_spec"


@dataclasses.dataclass(frozen=True)
class LayerSpecConstraint(VariableConstraint):
    """The spec that a layer gave its variable `pattern`, by mesh axis."""

    pattern: str
    placed: tuple[tuple[str, Placement], ...]

    exact: ClassVar[bool] = True

    @property
    def named_axes(self) -> tuple[str, ...]:
        return tuple(axis for axis, _ in self.placed)

    def placements(self, name: str, shape: Sequence[int], mesh: Mesh) -> dict[int, Placement]:
        return {mesh.axis(axis): placement for axis, placement in self.placed}

    def __str__(self) -> str:
        return f"spec of {self.pattern!r}: " + ", ".join(f"{p} over {a!r}" for a, p in self.placed)


def read_spec(spec: Iterable[Placement | str], shape_rank: int, what: str) -> tuple[Placement, ...]:
    """Read `spec` as placements, dims counted from the front.

    Args:
        spec: `Shard`, `Replicate`, or as they print (`"S(1)"`), one for each mesh axis.
        shape_rank: of the weight.
        what: the weight, or its layer, for messages.

    Raises:
        SpecError: something else, or a dim that the weight lacks.
    """
    given = check_list(
        f"{what}: spec", spec, "a list of placements, such as [tap.Shard(1), 'S(0)']"
    )
    try:
        placements = tuple(parse_placement(p) if isinstance(p, str) else p for p in given)
    except (ArgumentError, SpecError) as error:
        raise SpecError(f"{what}: {error}") from None
    for placement in placements:
        if not isinstance(placement, Shard | Replicate):
            raise argument_error(
                f"{what}: an entry of spec", placement, "tap.Shard(dim) or tap.Replicate()"
            )
        if isinstance(placement, Shard) and not -shape_rank <= placement.dim < shape_rank:
            raise SpecError(
                f"{what}: {placement} splits dim {placement.dim}, but the weight has {shape_rank} "
                f"dims: dim is one of {-shape_rank}..{shape_rank - 1}."
            )
    return tuple(
        Shard(p.dim % shape_rank, p.stride, p.unit) if isinstance(p, Shard) else p
        for p in placements
    )


def check_fits(spec: Sequence[Placement], mesh: Mesh, what: str) -> None:
    """Raise SpecError if `spec` has more placements than `mesh` has axes."""
    if len(spec) > mesh.num_axes:
        raise SpecError(
            f"{what}: the spec {format_spec(tuple(spec))} has {len(spec)} placements, but the mesh "
            f"has {mesh.num_axes} axes ({mesh}). Give at most one for each axis; fewer are those "
            f"of the last axes."
        )


def mark(variable: Any, spec: Sequence[Placement]) -> None:
    """Note on a TensorFlow variable that it is to have `spec`, wherever it is placed."""
    setattr(variable, _MARK, tuple(spec))


def collect_layer_specs(
    variables: Iterable[tuple[str, Any]], mesh: Mesh
) -> tuple[LayerSpecConstraint, ...]:
    """Collect the constraints that are noted on variables, given as (name, variable).

    A spec that is shorter than the mesh is that of its last axes.

    Raises:
        SpecError: a spec is longer than the mesh.
    """
    found = []
    for name, variable in variables:
        spec = getattr(variable, _MARK, None)
        if spec:
            check_fits(spec, mesh, f"Variable {name!r}")
            axes = mesh.axis_names[mesh.num_axes - len(spec) :]
            found.append(LayerSpecConstraint(name, tuple(zip(axes, spec, strict=True))))
    return tuple(found)
