"""Mesh: named logical axes laid over ranks, row-major."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from tfpar.spec.arguments import check_list, integer, shown, to_integer
from tfpar.spec.errors import SpecError

DEFAULT_AXIS_NAMES = {1: ("data",), 2: ("data", "model")}

MOST_RANKS = 2**20
"""More than any machine has: what is said of ranks is listed rank by rank."""

_NAMES = "a list with a name for each axis"
_LIKE_A_MESH = "a number of ranks, sizes such as [2, 8], or {'data': 2, 'model': 8}"


@dataclasses.dataclass(frozen=True)
class Mesh:
    """A grid of ranks with named axes.

    Rank `r` sits at the row-major coordinates of `r` in `shape`: the last axis
    varies fastest, so ranks that differ only in the last axis are neighbours.

    Attributes:
        axis_names: one name per axis, unique.
        shape: one size per axis, each at least 1.

    Raises:
        SpecError: empty mesh, size below 1, or repeated or empty names.
    """

    axis_names: tuple[str, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        names = check_list("axis_names", self.axis_names, _NAMES)
        sizes = check_list("shape", self.shape, "a list with a size for each axis")
        object.__setattr__(self, "axis_names", names)
        object.__setattr__(self, "shape", tuple(map(_whole, sizes)))
        if not self.shape or len(self.shape) != len(self.axis_names):
            raise SpecError(
                f"A mesh needs one name per axis and at least one axis; got names "
                f"{shown(self.axis_names)} and shape {shown(self.shape)}."
            )
        for name, size in zip(self.axis_names, self.shape, strict=True):
            if not isinstance(name, str) or not name:
                raise SpecError(f"Mesh axis names are non-empty strings; got {shown(name)}.")
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise SpecError(
                    f"Mesh axis {name!r} has size {shown(size)}; a size is an integer of at "
                    f"least 1. Use size 1 for an axis that is not split."
                )
        if self.size > MOST_RANKS:
            raise SpecError(f"A mesh has {MOST_RANKS} ranks at most; {self} has more.")
        if len(set(self.axis_names)) != len(self.axis_names):
            raise SpecError(f"Mesh axis names repeat: {self.axis_names}.")

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        # Meshes are part of the keys of every memo.
        return hash((self.axis_names, self.shape))

    @classmethod
    def of(cls, axes: Mesh | Mapping[str, int] | Sequence[int] | int) -> Mesh:
        """Make a mesh from itself, `{"data": 2, "model": 4}`, or sizes with default names, `4` or
        `[4]`.

        Raises:
            ArgumentError: something else.
            SpecError: as of `Mesh`.
        """
        if isinstance(axes, Mesh):
            return axes
        if isinstance(axes, Mapping):
            return cls(tuple(axes), tuple(axes.values()))
        sizes = (axes,) if to_integer(axes) is not None else check_list("mesh", axes, _LIKE_A_MESH)
        names = DEFAULT_AXIS_NAMES.get(len(sizes), tuple(f"axis{i}" for i in range(len(sizes))))
        return cls(names, sizes)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.shape)

    @property
    def num_axes(self) -> int:
        return len(self.shape)

    def axis(self, name: str) -> int:
        """Find the index of the axis called `name`; SpecError names the axes there are."""
        try:
            return self.axis_names.index(name)
        except ValueError:
            raise SpecError(
                f"Mesh has no axis {shown(name)}; its axes are {self}. "
                f"Use one of {', '.join(map(repr, self.axis_names))}."
            ) from None

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Find the row-major coordinates of `rank`."""
        return self._all_coordinates[rank]

    @functools.cached_property
    def _all_coordinates(self) -> tuple[tuple[int, ...], ...]:
        return tuple(itertools.product(*map(range, self.shape)))

    def groups(self, axes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """List the ranks that differ only along `axes`, each group ordered major to minor."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank, coords in enumerate(self._all_coordinates):
            rest = tuple(c for a, c in enumerate(coords) if a not in axes)
            groups.setdefault(rest, []).append(rank)
        return tuple(map(tuple, groups.values()))

    def group_size(self, axes: tuple[int, ...]) -> int:
        return math.prod(self.shape[a] for a in axes)

    def with_axis(self, name: str, size: int) -> Mesh:
        """Add one more axis behind those of the mesh, whose ranks lie within those of this one."""
        return Mesh((*self.axis_names, name), (*self.shape, size))

    def without_last_axis(self) -> Mesh:
        """Undo `with_axis`."""
        return Mesh(self.axis_names[:-1], self.shape[:-1])

    @property
    def views(self) -> tuple[Mesh, ...]:
        """The mesh as each kind of ranks sees it; here all are alike."""
        return (self,)

    def stored(self, axis: int, length: int) -> int:
        """Count the entries of a dim of `length`, split by `axis`, that a rank stores, padding
        included."""
        return -(-length // self.shape[axis])

    def block(self, axis: int, length: int, at: int) -> tuple[int, int]:
        """Find the first entry, and how many, of what is stored at coordinate `at` of `axis`.

        Padding is included: entries from `length` on are none.
        """
        each = -(-length // self.shape[axis])
        return at * each, each

    def sized(self, num_ranks: int) -> Mesh:
        """Make the mesh of so many ranks with these axes, such as that of one stage.

        The last axes keep as much of their size as goes into it, and the first has the rest:
        `[2, 8]` of 8 ranks is `[1, 8]`, of 4 `[1, 4]`, of 3 `[3, 1]`; `[3, 8]` of 12 is `[3, 4]`.

        Raises:
            ArgumentError: not a number of ranks.
        """
        left, shape = integer("num_ranks", num_ranks, 1), []
        for size in reversed(self.shape):
            shape.append(math.gcd(left, size))
            left //= shape[-1]
        shape[-1] *= left
        return Mesh(self.axis_names, tuple(reversed(shape)))

    def __str__(self) -> str:
        return " x ".join(f"{n}={s}" for n, s in zip(self.axis_names, self.shape, strict=True))


def _whole(size: Any) -> Any:
    """`size` as an int if it is a whole number."""
    found = to_integer(size)
    return size if found is None else found


def split(
    shape: Mesh | Mapping[str, int] | Sequence[int] | int, axis_names: Sequence[str] | None = None
) -> Mesh:
    """Make the mesh of `shape`: `split([2, 8])` is 2 workers with 8 devices each.

    The axes are called `("data", "model")` for two, `("data",)` for one, unless
    `axis_names` or a mapping `{"name": size}` says otherwise.
    """
    mesh = Mesh.of(shape)
    return (
        mesh
        if axis_names is None
        else Mesh(check_list("axis_names", axis_names, _NAMES), mesh.shape)
    )


def divisors(size: int) -> list[int]:
    """Return the divisors of a number, the least first."""
    return [n for n in range(1, size + 1) if size % n == 0]
