"""Which spec the constraints give each variable."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from tfpar.constraints.axes import check_axes
from tfpar.constraints.kinds import Constraint, LayoutVariable, VariableConstraint
from tfpar.constraints.patterns import compile_pattern, matches_nothing
from tfpar.spec import Mesh, Placement, Replicate, Spec, SpecError, format_spec, local_shape

logger = logging.getLogger("tfpar")


@dataclasses.dataclass(frozen=True)
class Resolution:
    """What the constraints make of one variable or tensor: its spec, and which did it."""

    spec: Spec
    constraints: tuple[Constraint, ...]

    @property
    def reason(self) -> str:
        return "; ".join(map(str, self.constraints))


def resolve(
    constraints: Sequence[Constraint], variables: Sequence[tuple[str, Sequence[int]]], mesh: Mesh
) -> dict[str, Spec]:
    """The spec of every variable that some constraint matches.

    Args:
        variables: (path, shape) of each.

    Raises:
        SpecError: a constraint that matches nothing or cannot hold, or two that
            contradict each other.
    """
    return {n: r.spec for n, r in resolve_variables(constraints, variables, mesh).items()}


def resolve_variables(
    constraints: Sequence[Constraint],
    variables: Sequence[tuple[str, Sequence[int]]],
    mesh: Mesh,
    *,
    must_match: bool = True,
) -> dict[str, Resolution]:
    """As `resolve`, with the constraints behind each spec.

    `must_match=False` lets constraints match nothing: for a step that uses only some of the
    variables (an evaluation has no optimizer).
    """
    check_axes(constraints, mesh)
    matches: dict[str, list[VariableConstraint]] = {}
    unmatched: list[VariableConstraint] = []
    for constraint in constraints:
        if not isinstance(constraint, VariableConstraint):
            continue
        names = [n for n, _ in variables if _matches(constraint, n)]
        for name in names:
            matches.setdefault(name, []).append(constraint)
        if not names:
            unmatched.append(constraint)
    if must_match:
        _report_unmatched(unmatched, matches, [n for n, _ in variables])
    return {
        name: _combine(name, shape, matches[name], mesh)
        for name, shape in variables
        if name in matches
    }


def _matches(constraint: VariableConstraint, name: str) -> bool:
    if name == constraint.pattern or constraint.exact:
        return name == constraint.pattern
    return compile_pattern(constraint.pattern).fullmatch(name) is not None


def _report_unmatched(
    unmatched: Sequence[VariableConstraint], matches: Mapping[str, Any], names: Sequence[str]
) -> None:
    for constraint in unmatched:
        text = matches_nothing(constraint, constraint.pattern, names, "variable")
        if not isinstance(constraint, LayoutVariable) or not matches:
            raise SpecError(text)
        logger.warning("%s", text)


def _combine(
    name: str, shape: Sequence[int], matching: Sequence[VariableConstraint], mesh: Mesh
) -> Resolution:
    # Patterns that are the path itself come first and win.
    chosen: dict[int, tuple[Placement, VariableConstraint]] = {}
    for exact in (True, False):
        decided = set(chosen) if not exact else set()
        for constraint in matching:
            if (constraint.pattern == name) != exact:
                continue
            for axis, placement in constraint.placements(name, shape, mesh).items():
                if axis in decided:
                    continue
                have = chosen.setdefault(axis, (placement, constraint))
                if have[0] != placement:
                    raise SpecError(
                        f"Variable {name!r} of shape {tuple(shape)}: {have[1]} and {constraint} "
                        f"contradict each other along mesh axis {mesh.axis_names[axis]!r} "
                        f"({have[0]} and {placement}). An axis splits a variable once: narrow "
                        f"one of the patterns, or use another mesh axis."
                    )
    spec = tuple(chosen[a][0] if a in chosen else Replicate() for a in range(mesh.num_axes))
    used = tuple(dict.fromkeys(c for _, c in chosen.values()))
    try:
        local_shape(shape, spec, mesh)
    except SpecError as error:
        raise SpecError(
            f"Variable {name!r} of shape {tuple(shape)} cannot be {format_spec(spec)} on {mesh} "
            f"({'; '.join(map(str, used))}): {error} A stride must divide the length that the "
            f"axes before leave of the dim."
        ) from None
    return Resolution(spec, used)
