"""Constraint types, and the functions that make them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from tfpar.ir.graph import Tensor
from tfpar.spec import Mesh, Placement, Replicate, Shard, SpecError
from tfpar.spec.arguments import (
    argument_error,
    check_choice,
    check_list,
    instance,
    integer,
    optional,
    text,
    written,
)


class Constraint:
    """Base of all constraints; made by `shard`, `replicate`, `fsdp`, `context_parallel`,
    `shard_output`, `batch`, `stage`."""

    @property
    def named_axes(self) -> tuple[str, ...]:
        """Mesh axes that it names."""
        return ()


class VariableConstraint(Constraint):
    """A constraint on every variable whose path matches `pattern`.

    Attributes:
        exact: `pattern` is no regular expression, but the path of one variable.
        paired: and one that was written down elsewhere, as `ir.names.pair` reads it.
    """

    pattern: str
    exact: ClassVar[bool] = False
    paired: ClassVar[bool] = False

    def placements(self, name: str, shape: Sequence[int], mesh: Mesh) -> dict[int, Placement]:
        """Return the placements that it fixes of variable `name`, by mesh axis index."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class ShardVariable(VariableConstraint):
    """See `shard`."""

    pattern: str
    dim: int
    axis: str
    stride: int | None = None

    def __post_init__(self) -> None:
        check_pattern(self, self.pattern)
        _axis(f"{self}: axis", self.axis)
        stride = None if self.stride is None else integer(f"{self}: stride", self.stride, 1)
        object.__setattr__(self, "stride", stride)
        object.__setattr__(self, "dim", integer(f"{self}: dim", self.dim))

    @property
    def named_axes(self) -> tuple[str, ...]:
        return (self.axis,)

    def placements(self, name: str, shape: Sequence[int], mesh: Mesh) -> dict[int, Placement]:
        dim = _normal_dim(self, self.dim, f"variable {name!r}", shape)
        return {mesh.axis(self.axis): Shard(dim, self.stride)}

    def __str__(self) -> str:
        stride = "" if self.stride is None else f", stride={written(self.stride)}"
        laid = f"dim={written(self.dim)}, axis={written(self.axis)}{stride}"
        return f"shard({written(self.pattern)}, {laid})"


@dataclasses.dataclass(frozen=True)
class ReplicateVariable(VariableConstraint):
    """See `replicate`."""

    pattern: str
    axis: str | None = None

    def __post_init__(self) -> None:
        check_pattern(self, self.pattern)
        optional(_axis, f"{self}: axis", self.axis)

    @property
    def named_axes(self) -> tuple[str, ...]:
        return () if self.axis is None else (self.axis,)

    def placements(self, name: str, shape: Sequence[int], mesh: Mesh) -> dict[int, Placement]:
        axes = range(mesh.num_axes) if self.axis is None else (mesh.axis(self.axis),)
        return {a: Replicate() for a in axes}

    def __str__(self) -> str:
        axis = "" if self.axis is None else f", axis={written(self.axis)}"
        return f"replicate({written(self.pattern)}{axis})"


@dataclasses.dataclass(frozen=True)
class LayoutVariable(VariableConstraint):
    """One entry of a layout map: a mesh axis or None for each dim; see `from_layout_map`."""

    pattern: str
    axes: tuple[str | None, ...]

    def __post_init__(self) -> None:
        _check_layout(self, self.pattern, self.axes)

    @property
    def named_axes(self) -> tuple[str, ...]:
        return tuple(a for a in self.axes if a is not None)

    def placements(self, name: str, shape: Sequence[int], mesh: Mesh) -> dict[int, Placement]:
        return _laid_out(self, self.axes, f"variable {name!r}", shape, mesh)

    def __str__(self) -> str:
        return f"layout {written(self.pattern)}: {self.axes}"


class OutputConstraint(Constraint):
    """A constraint on what leaves the scopes of ops that match `pattern`; see `shard_output`."""

    pattern: str

    def placements(self, tensor: Tensor, mesh: Mesh) -> dict[int, Placement]:
        """Return the placements that it fixes of an activation, by mesh axis index."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class ShardOutput(OutputConstraint):
    """See `shard_output`."""

    pattern: str
    dim: int | None
    axis: str

    def __post_init__(self) -> None:
        check_pattern(self, self.pattern)
        _axis(f"{self}: axis", self.axis)
        object.__setattr__(self, "dim", optional(integer, f"{self}: dim", self.dim))

    @property
    def named_axes(self) -> tuple[str, ...]:
        return (self.axis,)

    def placements(self, tensor: Tensor, mesh: Mesh) -> dict[int, Placement]:
        axis = mesh.axis(self.axis)
        if self.dim is None:
            return {axis: Replicate()}
        return {axis: Shard(_normal_dim(self, self.dim, f"tensor {tensor.name!r}", tensor.shape))}

    def __str__(self) -> str:
        laid = f"dim={written(self.dim)}, axis={written(self.axis)}"
        return f"shard_output({written(self.pattern)}, {laid})"


@dataclasses.dataclass(frozen=True)
class LayoutOutput(OutputConstraint):
    """The layout of what a layer gives: a mesh axis or None for each dim, the batch's too; axes
    that it does not name have all of it. See `from_layout_map`."""

    pattern: str
    axes: tuple[str | None, ...]

    def __post_init__(self) -> None:
        _check_layout(self, self.pattern, self.axes)

    @property
    def named_axes(self) -> tuple[str, ...]:
        return tuple(a for a in self.axes if a is not None)

    def placements(self, tensor: Tensor, mesh: Mesh) -> dict[int, Placement]:
        return _laid_out(self, self.axes, f"tensor {tensor.name!r}", tensor.shape, mesh)

    def __str__(self) -> str:
        return f"layout of the output of {written(self.pattern)}: {self.axes}"


_EVERY = ".*"
ZERO_STAGES = (1, 2, 3)
"""What is sharded: optimizer slots; gradients as well; weights as well."""


@dataclasses.dataclass(frozen=True)
class FullyShard(Constraint):
    """See `fsdp`."""

    axis: str
    pattern: str
    stage: int
    keep: bool
    exact: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_pattern(self, self.pattern)
        _axis(f"{self}: axis", self.axis)
        check_choice(f"{self}: stage", self.stage, ZERO_STAGES)
        if instance(f"{self}: keep", self.keep, bool) and self.stage < 3:
            raise SpecError(
                f"{self}: stage {self.stage} stores weights whole, and gathers none that could be "
                f"kept. Leave out keep, or use stage=3."
            )

    @property
    def named_axes(self) -> tuple[str, ...]:
        return (self.axis,)

    def __str__(self) -> str:
        which = "" if self.pattern == _EVERY else f", {written(self.pattern)}"
        stage = "" if self.stage == 3 else f", stage={self.stage}"
        keep = ", keep=True" if self.keep else ""
        return f"fsdp({written(self.axis)}{which}{stage}{keep})"


@dataclasses.dataclass(frozen=True)
class SplitBatch(Constraint):
    """See `batch`."""

    axes: tuple[str, ...]

    def __post_init__(self) -> None:
        for axis in self.axes:
            _axis(f"{self}: an axis", axis)

    def __str__(self) -> str:
        return f"batch({', '.join(map(written, self.axes))})"


@dataclasses.dataclass(frozen=True)
class PutInStage(Constraint):
    """See `stage`."""

    pattern: str
    index: int

    def __post_init__(self) -> None:
        check_pattern(self, self.pattern)
        object.__setattr__(self, "index", integer(f"{self}: index", self.index, 0))

    def __str__(self) -> str:
        return f"stage({written(self.pattern)}, {written(self.index)})"


@dataclasses.dataclass(frozen=True)
class ContextParallel(Constraint):
    """See `context_parallel`."""

    axis: str

    def __post_init__(self) -> None:
        _axis(f"{self}: axis", self.axis)

    @property
    def named_axes(self) -> tuple[str, ...]:
        return (self.axis,)

    def __str__(self) -> str:
        return f"context_parallel({written(self.axis)})"


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


def fsdp(axis: str, pattern: str = _EVERY, *, stage: int = 3, keep: bool = False) -> Constraint:
    """Shard weights over the ranks along mesh axis `axis`, which split the batch (ZeRO, FSDP).

        with tap.auto_parallel(tap.split({"data": 8}), tap.fsdp("data")):

    A rank stores a part of each weight, and of its gradient and optimizer slots. All parts are
    gathered before the layers that read the weight, those of a block of layers at once and while
    the block before computes, and are let go after them; the backward pass gathers them again.
    Gradients are reduce-scattered. Numbers are those of data parallelism.

    Args:
        pattern: regular expression for the paths of weights, as of `shard`; by default all. Other
            variables that match are left alone.
        stage: 3: all of that. 1 or 2: weights are stored whole, and only their optimizer slots
            are sharded; gradients are scattered, and new weights gathered.
        keep: of stage 3: what the forward pass gathers is kept for the backward pass, which takes
            more memory and half the gathers.

    A weight is split in the longest dim that divides evenly and is not split along another axis;
    one whose dims are all shorter than the axis stays whole.
    """
    return FullyShard(axis, pattern, stage, keep)


def context_parallel(axis: str) -> Constraint:
    """Split the positions of sequences over mesh axis `axis` (context parallelism).

        mesh = tap.split({"data": 2, "context": 4})
        with tap.auto_parallel(mesh, tap.context_parallel("context")):

    Each rank has some positions of each sample, of inputs, labels and all that is computed of them.
    Attention runs on blocks of its scores (`attention="blockwise"`, unless that is given): either
    keys and values pass from rank to rank (ring attention; with a causal mask each rank has
    positions from the front and from the back, so that all do as much), or positions are exchanged
    for heads before it (Ulysses), as layers around it are split or a planner finds cheaper.

    The length of sequences has to be a multiple of the number of ranks along `axis`.
    """
    return ContextParallel(axis)


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


def stage(pattern: str, index: int) -> Constraint:
    """Put the layers that match into stage `index` of the pipeline; others are assigned.

        stage("block_1[2-9]", 2)

    Args:
        pattern: for the name, or its end, of a layer (a scope of forward ops, with or without the
            number of the call): what is inside goes with it. Where no layer matches, the ops of
            that name.
        index: counted from 0, virtual stages too. A layer cannot be in an earlier stage than what
            it reads.
    """
    return PutInStage(pattern, index)


def from_layout_map(mapping: Mapping[str, Any]) -> tuple[Constraint, ...]:
    """Constraints from a `keras.distribution.LayoutMap`, or any mapping like one.

        from_layout_map({".*/fc1/kernel": (None, "model"), ".*/fc1/bias": ("model",)})

    Each value gives a mesh axis name or None per dim. As in Keras, axes that an entry does not
    name replicate the variable. Entries that match nothing are warned of, not
    refused: published maps name layers that a model may lack. An entry whose pattern ends in
    `output` is of what layers give, which Keras calls `path/of/layer/output`.
    """
    if not isinstance(mapping, Mapping):
        raise argument_error("The layout map", mapping, _A_LAYOUT_MAP)
    constraints = []
    for pattern in mapping:
        layout = mapping[pattern]
        axes = check_list(
            f"The layout of {pattern!r}",
            getattr(layout, "axes", layout),
            "a mesh axis name or None per dim, e.g. (None, 'model')",
        )
        layer = _OUTPUT.fullmatch(pattern) if isinstance(pattern, str) else None
        constraints.append(
            LayoutVariable(pattern, axes) if layer is None else LayoutOutput(layer[1], axes)
        )
    return tuple(constraints)


_OUTPUT = re.compile(r"(.+?)/?output\$?", re.DOTALL)
"""A pattern for outputs of layers: the pattern for the layers."""


def constraints_of(name: str, given: Any) -> tuple[Constraint, ...]:
    """Return the constraints that are `given`: one, several, a layout map, or None for none.

    Args:
        name: of the argument, in messages.

    Raises:
        ArgumentError: something else; or SpecError, as of `from_layout_map`.
    """
    if given is None:
        return ()
    if isinstance(given, Constraint):
        return (given,)
    if isinstance(given, Mapping):
        return from_layout_map(given)
    found: list[Constraint] = []
    for one in check_list(name, given, _CONSTRAINTS):
        if not isinstance(one, Constraint | Mapping | tuple | list):
            raise argument_error(f"An entry of {name}", one, _A_CONSTRAINT)
        try:
            found += constraints_of(name, one)
        except RecursionError:  # lists in lists, without an end
            raise argument_error(name, given, _CONSTRAINTS) from None
    return tuple(found)


_A_CONSTRAINT = (
    "a constraint, which tap.shard, tap.replicate, tap.fsdp, tap.shard_output, tap.batch, "
    "tap.stage, tap.keep and tap.from_layout_map make"
)
_CONSTRAINTS = f"{_A_CONSTRAINT}, or a list of them"
_A_LAYOUT_MAP = "a keras.distribution.LayoutMap, or a mapping from patterns to axes"


LONGEST_PATTERN = 10_000
"""Characters of a pattern: to match much longer ones takes minutes."""


def check_pattern(constraint: Any, pattern: Any) -> None:
    """Refuse what is no regular expression; `constraint` says where it was given."""
    text(f"{constraint}: the pattern", pattern, "a regular expression: a string")
    if len(pattern) > LONGEST_PATTERN:
        raise SpecError(
            f"{type(constraint).__name__}: the pattern has {len(pattern)} characters; write one of "
            f"{LONGEST_PATTERN} at most, or several constraints."
        )
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise SpecError(
            f"{constraint}: the pattern is not a regular expression: {error}."
        ) from None


def _check_layout(constraint: Any, pattern: Any, axes: Sequence[str | None]) -> None:
    """Refuse a layout that names something else than axes, or one of them twice."""
    check_pattern(constraint, pattern)
    for axis in axes:
        optional(_axis, f"{constraint}: an axis", axis)
    named = [axis for axis in axes if axis is not None]
    if len(set(named)) != len(named):
        raise SpecError(
            f"{constraint} splits two dims over one mesh axis; an axis splits a tensor once. "
            f"Put None for one of the dims."
        )


def _laid_out(
    constraint: Constraint,
    axes: Sequence[str | None],
    what: str,
    shape: Sequence[int] | None,
    mesh: Mesh,
) -> dict[int, Placement]:
    """The placements of a layout: whole along the axes of the mesh that it does not name."""
    if shape is None or len(axes) > len(shape):
        raise SpecError(
            f"{constraint} lays out {len(axes)} dims, but {what} has shape "
            f"{shape if shape is None else tuple(shape)}. Give one axis or None per dim, or narrow "
            f"the pattern."
        )
    found: dict[int, Placement] = {a: Replicate() for a in range(mesh.num_axes)}
    for dim, axis in enumerate(axes):
        if axis is not None:
            found[mesh.axis(axis)] = Shard(dim)
    return found


def _axis(name: str, value: Any) -> str:
    return text(name, value, "the name of a mesh axis")


def _normal_dim(constraint: Constraint, dim: int, what: str, shape: Sequence[int]) -> int:
    if shape is None or not -len(shape) <= dim < len(shape):
        rank = 0 if shape is None else len(shape)
        allowed = f"dim is one of {-rank}..{rank - 1}" if rank else "it has no dims to split"
        raise SpecError(
            f"{constraint} matches {what} of shape {shape if shape is None else tuple(shape)}, "
            f"where {allowed}. Change dim, or narrow the pattern."
        )
    return dim % len(shape)
