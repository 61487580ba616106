"""Constraints: what a user fixes of a plan; propagation decides the rest.

    tap.shard("block_.*/fc1/kernel", dim=1, axis="model")

A pattern is a regular expression that must match the whole path of a variable, or all of its
end from some component on: `fc1/kernel` matches "fc1/kernel" and "gpt/block_0/fc1/kernel", but
not "fc1/kernel_scale" nor "myfc1/kernel". (`keras.distribution.LayoutMap` of Keras 3.15 wants
the whole path; what matches there matches here.) An exact path wins over patterns. Constraints
on different mesh axes of one variable combine, and axes that none of them names
replicate it. A variable that no constraint matches is left to propagation.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tfpar.ir.graph import Graph, Op, Tensor, is_floating
from tfpar.spec import Mesh, Placement, Replicate, Shard, Spec, SpecError, format_spec, local_shape

logger = logging.getLogger("tfpar")

BATCH_AXIS_NAMES = frozenset({"data", "batch"})
"""Mesh axes that hold the batch by convention, whatever else is laid over them (ZeRO, FSDP)."""

_BACKWARD_SCOPE = "gradient_tape"
_SHAPE_READERS = frozenset({"Shape", "ShapeN", "Size", "Rank"})


class Constraint:
    """Base of all constraints; made by `shard`, `replicate`, `shard_output`, `batch`."""

    @property
    def named_axes(self) -> tuple[str, ...]:
        """The mesh axes over which it lays something."""
        return ()


class VariableConstraint(Constraint):
    """A constraint on every variable whose path matches `pattern`."""

    pattern: str

    def placements(self, name: str, shape: Sequence[int], mesh: Mesh) -> dict[int, Placement]:
        """What it fixes of variable `name`: mesh axis index -> placement."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class ShardVariable(VariableConstraint):
    """See `shard`."""

    pattern: str
    dim: int
    axis: str
    stride: int | None = None

    def __post_init__(self) -> None:
        _check_pattern(self, self.pattern)
        _check_dim(self, self.dim)

    @property
    def named_axes(self) -> tuple[str, ...]:
        return (self.axis,)

    def placements(self, name: str, shape: Sequence[int], mesh: Mesh) -> dict[int, Placement]:
        dim = _normal_dim(self, self.dim, f"variable {name!r}", shape)
        return {mesh.axis(self.axis): Shard(dim, self.stride)}

    def __str__(self) -> str:
        stride = "" if self.stride is None else f", stride={self.stride}"
        return f"shard({self.pattern!r}, dim={self.dim}, axis={self.axis!r}{stride})"


@dataclasses.dataclass(frozen=True)
class ReplicateVariable(VariableConstraint):
    """See `replicate`."""

    pattern: str
    axis: str | None = None

    def __post_init__(self) -> None:
        _check_pattern(self, self.pattern)

    @property
    def named_axes(self) -> tuple[str, ...]:
        return () if self.axis is None else (self.axis,)

    def placements(self, name: str, shape: Sequence[int], mesh: Mesh) -> dict[int, Placement]:
        axes = range(mesh.num_axes) if self.axis is None else (mesh.axis(self.axis),)
        return {a: Replicate() for a in axes}

    def __str__(self) -> str:
        axis = "" if self.axis is None else f", axis={self.axis!r}"
        return f"replicate({self.pattern!r}{axis})"


@dataclasses.dataclass(frozen=True)
class LayoutVariable(VariableConstraint):
    """One entry of a layout map: a mesh axis or None for each dim; see `from_layout_map`."""

    pattern: str
    axes: tuple[str | None, ...]

    def __post_init__(self) -> None:
        _check_pattern(self, self.pattern)
        if len(set(self.named_axes)) != len(self.named_axes):
            raise SpecError(
                f"{self} splits two dims over one mesh axis; an axis splits a variable once. "
                f"Put None for one of the dims."
            )

    @property
    def named_axes(self) -> tuple[str, ...]:
        return tuple(a for a in self.axes if a is not None)

    def placements(self, name: str, shape: Sequence[int], mesh: Mesh) -> dict[int, Placement]:
        if len(self.axes) > len(shape):
            raise SpecError(
                f"{self} lays out {len(self.axes)} dims, but variable {name!r} has shape "
                f"{tuple(shape)}. Give one axis or None per dim, or narrow the pattern."
            )
        found: dict[int, Placement] = {a: Replicate() for a in range(mesh.num_axes)}
        for dim, axis in enumerate(self.axes):
            if axis is not None:
                found[mesh.axis(axis)] = Shard(dim)
        return found

    def __str__(self) -> str:
        return f"layout {self.pattern!r}: {self.axes}"


@dataclasses.dataclass(frozen=True)
class ShardOutput(Constraint):
    """See `shard_output`."""

    pattern: str
    dim: int | None
    axis: str

    def __post_init__(self) -> None:
        _check_pattern(self, self.pattern)
        if self.dim is not None:
            _check_dim(self, self.dim)

    @property
    def named_axes(self) -> tuple[str, ...]:
        return (self.axis,)

    def placement(self, tensor: Tensor) -> Placement:
        if self.dim is None:
            return Replicate()
        return Shard(_normal_dim(self, self.dim, f"tensor {tensor.name!r}", tensor.shape))

    def __str__(self) -> str:
        return f"shard_output({self.pattern!r}, dim={self.dim}, axis={self.axis!r})"


@dataclasses.dataclass(frozen=True)
class SplitBatch(Constraint):
    """See `batch`."""

    axes: tuple[str, ...]

    def __str__(self) -> str:
        return f"batch({', '.join(map(repr, self.axes))})"


def shard(pattern: str, dim: int, axis: str, stride: int | None = None) -> Constraint:
    """Split dimension `dim` of the variables that match over mesh axis `axis`.

    Args:
        pattern: regular expression for variable paths (or their ends), e.g.
            `"block_.*/fc1/kernel"`; see the module's docstring.
        dim: negative counts from the end. A size that does not divide is padded.
        stride: entries between the starts of neighbouring groups of blocks (Rhino §4.1): with
            a stride, every run of `stride` entries is split. None gives contiguous blocks.
    """
    return ShardVariable(pattern, dim, axis, stride)


def replicate(pattern: str, axis: str | None = None) -> Constraint:
    """Keep the variables that match whole along mesh axis `axis`, or along every axis."""
    return ReplicateVariable(pattern, axis)


def shard_output(pattern: str, dim: int | None, axis: str) -> Constraint:
    """Split dimension `dim` of an activation over mesh axis `axis`.

    Args:
        pattern: for the name, or its end, of a scope of forward ops (a layer: `"block_0/mlp"`,
            with or without the number of the call). What leaves the outermost scopes that
            match is split; where no scope matches, the first output of the ops that do.
        dim: negative counts from the end; None keeps the activation whole along `axis`.

    The batch stays split along the batch axes.
    """
    return ShardOutput(pattern, dim, axis)


def batch(*axes: str) -> Constraint:
    """Split the batch over exactly these mesh axes; none at all for `batch()`."""
    return SplitBatch(axes)


def from_layout_map(mapping: Mapping[str, Any]) -> tuple[Constraint, ...]:
    """Constraints from a `keras.distribution.LayoutMap`, or any mapping like one.

        from_layout_map({".*/fc1/kernel": (None, "model"), ".*/fc1/bias": ("model",)})

    Each value gives a mesh axis name or None per dim. As in Keras, axes that an entry does not
    name replicate the variable. Entries that match nothing are warned of, not
    refused: published maps name layers that a model may lack.
    """
    constraints = []
    for pattern in mapping:
        layout = mapping[pattern]
        axes = getattr(layout, "axes", layout)
        if isinstance(axes, str) or not isinstance(axes, Iterable):
            raise SpecError(
                f"Layout of {pattern!r} is {layout!r}; expected a mesh axis name or None per dim, "
                f"e.g. (None, 'model')."
            )
        constraints.append(LayoutVariable(pattern, tuple(axes)))
    return tuple(constraints)


def batch_axes(constraints: Sequence[Constraint], mesh: Mesh) -> tuple[str, ...]:
    """The mesh axes that split the batch, in mesh order.

    Those that `batch(...)` says. Without it: axes called "data" or "batch", and every
    axis that no constraint names; so all of them if there are no constraints.

    Raises:
        SpecError: something that is not a constraint, an unknown axis, or two different
            `batch(...)`.
    """
    check_axes(constraints, mesh)
    pinned = [c for c in constraints if isinstance(c, SplitBatch)]
    for other in pinned[1:]:
        if set(other.axes) != set(pinned[0].axes):
            raise SpecError(f"{pinned[0]} and {other} contradict each other. Keep one of them.")
    if pinned:
        return tuple(n for n in mesh.axis_names if n in pinned[0].axes)
    named = {axis for c in constraints for axis in c.named_axes}
    return tuple(n for n in mesh.axis_names if n in BATCH_AXIS_NAMES or n not in named)


def check_axes(constraints: Sequence[Constraint], mesh: Mesh) -> None:
    """Raise SpecError for what is no constraint, or names an axis that `mesh` lacks."""
    for constraint in constraints:
        if not isinstance(constraint, Constraint):
            raise SpecError(
                f"{constraint!r} is not a constraint. Constraints are made by tap.shard, "
                f"tap.replicate, tap.shard_output and tap.batch; unpack what from_layout_map "
                f"gives: [*tap.from_layout_map(layout_map)]."
            )
        axes = constraint.axes if isinstance(constraint, SplitBatch) else constraint.named_axes
        for axis in axes:
            if axis not in mesh.axis_names:
                raise SpecError(
                    f"{constraint}: the mesh has no axis {axis!r}; its axes are {mesh}. "
                    f"Use one of {', '.join(map(repr, mesh.axis_names))}."
                )


# --- variables -------------------------------------------------------------------


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
        pattern = _compile(constraint.pattern)
        names = [n for n, _ in variables if n == constraint.pattern or pattern.fullmatch(n)]
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


def _report_unmatched(
    unmatched: Sequence[VariableConstraint], matches: Mapping[str, Any], names: Sequence[str]
) -> None:
    for constraint in unmatched:
        text = _matches_nothing(constraint, constraint.pattern, names, "variable")
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


# --- activations -----------------------------------------------------------------


def resolve_outputs(
    constraints: Sequence[Constraint],
    graph: Graph,
    mesh: Mesh,
    *,
    must_match: bool = True,
) -> dict[str, Resolution]:
    """The spec of every tensor (by name) that some `shard_output` matches."""
    wanted = [c for c in constraints if isinstance(c, ShardOutput)]
    if not wanted:
        return {}
    axes = [mesh.axis(n) for n in batch_axes(constraints, mesh)]
    batch_size = next((t.shape[0] for t in graph.inputs if t.shape), None)
    chosen: dict[Tensor, dict[int, tuple[Placement, ShardOutput]]] = {}
    for constraint in wanted:
        tensors = _border_tensors(graph, constraint.pattern)
        if not tensors and must_match:
            scopes = sorted({s for op in graph.ops for s in _scopes(op)})
            raise SpecError(_matches_nothing(constraint, constraint.pattern, scopes, "scope or op"))
        for tensor in tensors:
            axis, placement = mesh.axis(constraint.axis), constraint.placement(tensor)
            have = chosen.setdefault(tensor, {}).setdefault(axis, (placement, constraint))
            if have[0] != placement:
                raise SpecError(
                    f"Tensor {tensor.name!r}: {have[1]} and {constraint} contradict each other "
                    f"along mesh axis {constraint.axis!r}. Narrow one of the patterns."
                )
    found = {}
    for tensor, placed in chosen.items():
        batched = bool(batch_size) and tensor.shape and tensor.shape[0] % batch_size == 0
        spec = tuple(
            placed[a][0] if a in placed else Shard(0) if batched and a in axes else Replicate()
            for a in range(mesh.num_axes)
        )
        found[tensor.name] = Resolution(spec, tuple(dict.fromkeys(c for _, c in placed.values())))
    return found


def _is_forward(op: Op) -> bool:
    return not op.name.startswith(f"{_BACKWARD_SCOPE}/")


def _scopes(op: Op) -> list[str]:
    """The name scopes around a forward op, outermost first."""
    parts = op.name.split("/")
    if not _is_forward(op):
        return []
    return ["/".join(parts[:i]) for i in range(1, len(parts))]


def _border_tensors(graph: Graph, pattern: str) -> list[Tensor]:
    compiled = _compile(pattern, _CALL_COUNT)
    members: dict[str, list[Op]] = {}
    for op in graph.ops:
        # The outermost scope that matches; those inside belong to it.
        scope = next((s for s in _scopes(op) if compiled.fullmatch(s)), None)
        if scope is not None:
            members.setdefault(scope, []).append(op)
    if not members:
        named = (op for op in graph.ops if _is_forward(op) and compiled.fullmatch(op.name))
        return [op.outputs[0] for op in named if op.outputs]
    readers = graph.consumers()
    returned = set(graph.outputs)
    leaving = (_leaving(ops, readers, returned) for ops in members.values())
    return [t for t in leaving if t is not None]


def _leaving(
    ops: Sequence[Op], readers: Mapping[Tensor, Sequence[Op]], returned: set[Tensor]
) -> Tensor | None:
    """The last floating tensor that forward ops outside of `ops` read: a layer's output."""
    inside = set(ops)
    for op in reversed(ops):
        if not op.outputs or not op.outputs[0].shape or not is_floating(op.outputs[0].dtype):
            continue
        tensor = op.outputs[0]
        if tensor in returned or any(
            r not in inside and _is_forward(r) and r.type not in _SHAPE_READERS
            for r in readers.get(tensor, ())
        ):
            return tensor
    return None


# --- checks and messages ---------------------------------------------------------


_CALL_COUNT = r"(?:_\d+)?"
"""Keras numbers a layer's name scopes by call: `block_0_ln1_1`."""


def _compile(pattern: str, suffix: str = "") -> re.Pattern[str]:
    """`pattern` for a whole path, or for its end from some component on."""
    return re.compile(rf"(?:.*/)?(?:{pattern}){suffix}")


def _check_pattern(constraint: Any, pattern: Any) -> None:
    if not isinstance(pattern, str) or not pattern:
        raise SpecError(f"A pattern is a regular expression (a string); got {pattern!r}.")
    try:
        re.compile(pattern)
    except re.error as error:
        raise SpecError(
            f"{constraint}: the pattern is not a regular expression: {error}."
        ) from None


def _check_dim(constraint: Any, dim: Any) -> None:
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise SpecError(f"{constraint}: dim is an integer; got {dim!r}.")


def _normal_dim(constraint: Constraint, dim: int, what: str, shape: Sequence[int]) -> int:
    if shape is None or not -len(shape) <= dim < len(shape):
        rank = 0 if shape is None else len(shape)
        allowed = f"dim is one of {-rank}..{rank - 1}" if rank else "it has no dims to split"
        raise SpecError(
            f"{constraint} matches {what} of shape {shape if shape is None else tuple(shape)}, "
            f"where {allowed}. Change dim, or narrow the pattern."
        )
    return dim % len(shape)


def _matches_nothing(constraint: Constraint, pattern: str, names: Sequence[str], what: str) -> str:
    inside = [n for n in names if re.search(pattern, n)]
    if inside:
        wider = [f".*{pattern}", f"{pattern}.*", f".*{pattern}.*"]
        wider = [w for w in wider if any(_compile(w).fullmatch(n) for n in inside)] or wider
        return (
            f"{constraint} matches no {what}: a pattern must match a name from some '/' to its "
            f"end. It is found inside {_some(inside)}; write {wider[0]!r}."
        )
    plain = re.sub(r"\\.|[\^$.*+?()\[\]{}|]+", "", pattern)
    depth = plain.count("/") + 1
    ends = {"/".join(n.split("/")[-depth:]): n for n in reversed(names)}
    near = [ends[e] for e in difflib.get_close_matches(plain, ends, n=3, cutoff=0.3)]
    if near:
        return f"{constraint} matches no {what}. The nearest names: {_some(near)}."
    return f"{constraint} matches no {what}. There are {len(names)}: {_some(names)}."


def _some(names: Sequence[str], limit: int = 3) -> str:
    shown = ", ".join(map(repr, names[:limit]))
    return shown + (f" and {len(names) - limit} more" if len(names) > limit else "")
