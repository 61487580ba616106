"""Resolution of constraints on variables: the spec of each, and the axes that split the batch."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tfpar.constraints.constraint_types import (
    Constraint,
    ContextParallel,
    FullyShard,
    LayoutVariable,
    SplitBatch,
    VariableConstraint,
)
from tfpar.constraints.patterns import compile_pattern, matches_nothing
from tfpar.ir.names import pair, user_names
from tfpar.spec import Mesh, Placement, Replicate, Spec, SpecError, format_spec, local_shape

logger = logging.getLogger("tfpar")


class _Matching(Protocol):
    """A constraint with a pattern for paths."""

    @property
    def pattern(self) -> str: ...

    @property
    def exact(self) -> bool: ...


@dataclasses.dataclass(frozen=True)
class Resolution:
    """Resolution of the constraints of one variable or tensor: its spec, and those that set it."""

    spec: Spec
    constraints: tuple[Constraint, ...]

    @property
    def reason(self) -> str:
        return "; ".join(map(str, self.constraints))


def resolve(
    constraints: Sequence[Constraint], variables: Sequence[tuple[str, Sequence[int]]], mesh: Mesh
) -> dict[str, Spec]:
    """Resolve the spec of every variable that some constraint matches.

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
    places: Mapping[str, str] | None = None,
) -> dict[str, Resolution]:
    """Resolve specs as `resolve`, with the constraints behind each spec.

    Args:
        must_match: False lets constraints match nothing: for a step that uses only some of the
            variables (an evaluation has no optimizer).
        places: of variables in their model, by path: a pattern may name these as well.
    """
    check_axes(constraints, mesh)
    places = {n: (places or {}).get(n, "") for n, _ in variables}
    called = {n: user_names(n, place) for n, place in places.items()}
    matching: dict[str, list[VariableConstraint]] = {}
    unmatched: list[VariableConstraint] = []
    on_variables = [c for c in constraints if isinstance(c, VariableConstraint)]
    now = pair([c.pattern for c in on_variables if c.paired], places)
    for constraint in on_variables:
        if constraint.paired:
            names = [now[constraint.pattern]] if constraint.pattern in now else []
        else:
            names = [n for n, known in called.items() if matches(constraint, known)]
        for name in names:
            matching.setdefault(name, []).append(constraint)
        if not names:
            unmatched.append(constraint)
    if must_match:
        _report_unmatched(unmatched, matching, [n for n, _ in variables])
    return {
        name: _combine(called[name], shape, matching[name], mesh)
        for name, shape in variables
        if name in matching
    }


def matches(constraint: _Matching, names: Sequence[str]) -> bool:
    """Whether `constraint` speaks of the variable that is called `names`."""
    if constraint.exact:
        return names[0] == constraint.pattern
    if constraint.pattern in names:
        return True
    pattern = compile_pattern(constraint.pattern)
    return any(pattern.fullmatch(name) for name in names)


def _report_unmatched(
    unmatched: Sequence[VariableConstraint], matches: Mapping[str, Any], names: Sequence[str]
) -> None:
    for constraint in unmatched:
        text = matches_nothing(constraint, constraint.pattern, names, "variable")
        if not isinstance(constraint, LayoutVariable) or not matches:
            raise SpecError(text)
        logger.warning("%s", text)


def _combine(
    names: Sequence[str], shape: Sequence[int], matching: Sequence[VariableConstraint], mesh: Mesh
) -> Resolution:
    name = names[0]
    # Patterns that are the path itself come first and win.
    chosen: dict[int, tuple[Placement, VariableConstraint]] = {}
    for exact in (True, False):
        decided = set(chosen) if not exact else set()
        for constraint in matching:
            if (constraint.exact or constraint.pattern in names) != exact:
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


# --- axes -----------------------------------------------------------------------------------

BATCH_AXIS_NAMES = frozenset({"data", "batch"})
"""Mesh axes that hold the batch by convention, whatever else is laid over them (ZeRO, FSDP)."""


def batch_axes(constraints: Sequence[Constraint], mesh: Mesh) -> tuple[str, ...]:
    """Return the mesh axes that split the batch, in mesh order.

    Those that `batch(...)` says. Without it: axes called "data" or "batch", and every
    axis that no constraint names but `fsdp`; so all of them if there are no constraints. Those of
    `context_parallel` split positions, whatever they are called.

    Raises:
        SpecError: an unknown axis, two different `batch(...)`, or one that names an axis which
            splits positions.
    """
    check_axes(constraints, mesh)
    pinned = [c for c in constraints if isinstance(c, SplitBatch)]
    for other in pinned[1:]:
        if set(other.axes) != set(pinned[0].axes):
            raise SpecError(f"{pinned[0]} and {other} contradict each other. Keep one of them.")
    splits = {c.axis: c for c in constraints if isinstance(c, ContextParallel)}
    for axis in (a for a in (pinned[0].axes if pinned else ()) if a in splits):
        raise SpecError(
            f"{pinned[0]} and {splits[axis]} contradict each other: axis {axis!r} splits samples "
            f"or positions. Take another axis for one of them."
        )
    if pinned:
        return tuple(n for n in mesh.axis_names if n in pinned[0].axes)
    others = [c for c in constraints if not isinstance(c, FullyShard)]
    named = {axis for c in others for axis in c.named_axes}
    return tuple(
        n for n in mesh.axis_names if (n in BATCH_AXIS_NAMES and n not in splits) or n not in named
    )


def check_axes(constraints: Sequence[Constraint], mesh: Mesh) -> None:
    """Raise SpecError for a constraint that names an axis which `mesh` lacks."""
    for constraint in constraints:
        axes = constraint.axes if isinstance(constraint, SplitBatch) else constraint.named_axes
        for axis in axes:
            if axis not in mesh.axis_names:
                raise SpecError(
                    f"{constraint}: the mesh has no axis {axis!r}; its axes are {mesh}. "
                    f"Use one of {', '.join(map(repr, mesh.axis_names))}."
                )
