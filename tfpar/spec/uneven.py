"""Meshes whose ranks get unequal shares of what an axis splits."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

from tfpar.spec.arguments import integer
from tfpar.spec.errors import SpecError
from tfpar.spec.mesh import Mesh


@dataclasses.dataclass(frozen=True)
class UnevenMesh(Mesh):
    """Mesh along one axis of which ranks get shares of a dim in proportion to whole numbers.

    A dim whose length is a multiple of the sum of the shares is cut in proportion, without padding;
    any other one, and what other axes split, evenly. Samples are shared out one by one (see
    `apportion`), so all that has the batch as a factor is cut in proportion, always at the same
    samples.

    Shapes differ between ranks: what takes a mesh and gives a shape gives that of `rank`.

    Attributes:
        uneven_axis: position of the axis.
        shares: of each of its coordinates, at least 1.
        rank: whose shapes are meant.

    Raises:
        SpecError: an axis or a rank that the mesh does not have, or shares that are not one for
            each coordinate, or below 1.
    """

    uneven_axis: int = 0
    shares: tuple[int, ...] = ()
    rank: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.uneven_axis < self.num_axes or not 0 <= self.rank < self.size:
            raise SpecError(f"{self} has no axis {self.uneven_axis}, or no rank {self.rank}.")
        parts = self.shape[self.uneven_axis]
        if len(self.shares) != parts or min(self.shares) < 1:
            name = self.axis_names[self.uneven_axis]
            raise SpecError(
                f"Mesh axis {name!r} takes {parts} shares of at least 1, not {list(self.shares)}."
            )

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.axis_names, self.shape, self.uneven_axis, self.shares, self.rank))

    @classmethod
    def over(cls, mesh: Mesh, axis: int, shares: Sequence[int], rank: int = 0) -> UnevenMesh:
        """Give `mesh` these shares along `axis`, as `rank` sees it."""
        return cls(mesh.axis_names, mesh.shape, axis, tuple(shares), rank)

    @property
    def even(self) -> Mesh:
        """The mesh without the shares."""
        return Mesh(self.axis_names, self.shape)

    def seen_from(self, rank: int) -> UnevenMesh:
        """Make the same mesh with the shapes of `rank`."""
        return dataclasses.replace(self, rank=rank)

    def within(self, mesh: Mesh) -> UnevenMesh:
        """Give the same shares to a mesh that has further axes behind those of this one."""
        first = self.rank * (mesh.size // self.size)
        return UnevenMesh.over(mesh, self.uneven_axis, self.shares, first)

    def with_axis(self, name: str, size: int) -> UnevenMesh:
        return self.within(super().with_axis(name, size))

    def without_last_axis(self) -> UnevenMesh:
        mesh = super().without_last_axis()
        return UnevenMesh.over(mesh, self.uneven_axis, self.shares, self.rank // self.shape[-1])

    @functools.cached_property
    def views(self) -> tuple[UnevenMesh, ...]:
        """The mesh as ranks see it that have the same share: for each share the first of them."""
        firsts: dict[int, int] = {}
        for share, rank in zip(self.shares, self.representatives, strict=True):
            firsts.setdefault(share, rank)
        return tuple(map(self.seen_from, firsts.values()))

    @property
    def view_of(self) -> tuple[int, ...]:
        """Index, in `views`, of each rank's own."""
        shares = list(dict.fromkeys(self.shares))
        at = (self.coordinates(rank)[self.uneven_axis] for rank in range(self.size))
        return tuple(shares.index(self.shares[i]) for i in at)

    @functools.cached_property
    def representatives(self) -> tuple[int, ...]:
        """For each coordinate of the uneven axis the first rank that has it.

        Ranks with the same one have the same shapes.
        """
        firsts: dict[int, int] = {}
        for rank in range(self.size):
            firsts.setdefault(self.coordinates(rank)[self.uneven_axis], rank)
        return tuple(firsts[at] for at in range(len(self.shares)))

    @property
    def widest(self) -> UnevenMesh:
        """The same mesh with the shapes of a rank that has the largest share."""
        return self.seen_from(self.representatives[self.shares.index(max(self.shares))])

    def proportional(self, axis: int, length: int) -> bool:
        """Whether `axis` cuts a dim of `length` in proportion to shares."""
        return axis == self.uneven_axis and length % sum(self.shares) == 0

    def stored(self, axis: int, length: int) -> int:
        return self.block(axis, length, self.coordinates(self.rank)[axis])[1]

    def block(self, axis: int, length: int, at: int) -> tuple[int, int]:
        if not self.proportional(axis, length):
            return super().block(axis, length, at)
        each, before = length // sum(self.shares), self._before
        return each * before[at], each * self.shares[at]

    @functools.cached_property
    def _before(self) -> tuple[int, ...]:
        """Of each coordinate, the shares of those before it."""
        return (0, *itertools.accumulate(self.shares))


def seen_rank(mesh: Mesh) -> int:
    """Find the rank whose shapes `mesh` gives."""
    return mesh.rank if isinstance(mesh, UnevenMesh) else 0


def apportion(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Apportion `total` in whole numbers, each at least 1, as near to the proportion of `weights`
    as can be.

    The largest remainders are rounded up, the first of equal ones first.

    Args:
        weights: above 0.

    Raises:
        ArgumentError: less than 1 for each weight.
    """
    left = integer("total", total, len(weights)) - len(weights)
    whole = math.fsum(weights)
    # One for each is given first, and counts.
    wanted = [max(0.0, total * weight / whole - 1) for weight in weights]
    scale = left / math.fsum(wanted) if left else 0.0
    exact = [scale * one for one in wanted]
    found = [math.floor(one) for one in exact]
    by_remainder = sorted(range(len(found)), key=lambda i: (found[i] - exact[i], i))
    for i in by_remainder[: left - sum(found)]:
        found[i] += 1
    return tuple(1 + one for one in found)
