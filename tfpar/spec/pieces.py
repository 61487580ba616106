"""Pieces of a tensor that ranks of one mesh need of those of another: intersections of boxes.

Along each dimension a rank stores some of the tensor's entries (`layout.local_indices`), so what it
stores of all is a box, and what one rank needs of another is a box, too.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from tfpar.spec.errors import SpecError
from tfpar.spec.layout import local_indices
from tfpar.spec.mesh import Mesh
from tfpar.spec.placement import Shard, Spec

Positions = tuple[np.ndarray, ...]
"""Along each dimension, which entries of what a rank stores."""


@dataclasses.dataclass(frozen=True)
class ShardedTensor:
    """A tensor as ranks store it.

    Attributes:
        shape: of the whole.
        mesh: of the ranks; behind its axes there may be others, such as that of microbatches.
        spec: without partial sums.
        within: the coordinates along the other axes, of what is looked at.
    """

    shape: tuple[int, ...]
    mesh: Mesh
    spec: Spec
    within: tuple[int, ...] = ()

    @property
    def num_ranks(self) -> int:
        """Number of ranks, which those of other axes are not."""
        size = self.mesh.size
        for extent in self.mesh.shape[self.mesh.num_axes - len(self.within) :]:
            size //= extent
        return size

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Return the coordinates of a rank, those along other axes behind them."""
        axes = self.mesh.num_axes - len(self.within)
        own = Mesh(self.mesh.axis_names[:axes], self.mesh.shape[:axes])
        return (*own.coordinates(rank), *self.within)

    def indices(self, rank: int, dim: int) -> np.ndarray:
        """Return the index of each entry along `dim` that a rank stores; -1 is padding."""
        coordinates = self.coordinates(rank)
        return local_indices(self.shape[dim], dim, self.spec, self.mesh, coordinates)

    def shard(self, rank: int, dim: int) -> tuple[int, ...]:
        """Return what tells a rank's part along `dim` apart from those of others."""
        split = zip(self.spec, self.coordinates(rank), strict=True)
        return tuple(c for p, c in split if isinstance(p, Shard) and p.dim == dim)


@dataclasses.dataclass(frozen=True)
class Piece:
    """Piece of a tensor that each of some ranks gets of a rank of another mesh.

    Attributes:
        sources: the rank that each rank gets its piece from; None: it gets none, as the piece is
            empty.
        taken: the entries of what the source stores, for each rank that gets a piece.
        sizes: of each rank's piece.
    """

    sources: tuple[int | None, ...]
    taken: tuple[Positions, ...]
    sizes: tuple[tuple[int, ...], ...]

    def targets(self) -> Iterator[dict[int, int]]:
        """Yield, round by round, the rank that each source sends its piece to."""
        waiting = [(s, t) for t, s in enumerate(self.sources) if s is not None]
        while waiting:
            sent: dict[int, int] = {}
            left = []
            for source, target in waiting:
                if source in sent:
                    left.append((source, target))
                else:
                    sent[source] = target
            yield sent
            waiting = left


@dataclasses.dataclass(frozen=True)
class Pieces:
    """The pieces of a tensor by which it comes from one mesh to another.

    Attributes:
        grid: how many there are along each dimension.
        pieces: in the order of the grid, the last dimension first.
        order: for each rank and dimension, which entry of its joined pieces each entry that it
            stores is.
    """

    grid: tuple[int, ...]
    pieces: tuple[Piece, ...]
    order: tuple[Positions, ...]

    @property
    def num_entries(self) -> int:
        """Number of entries that are sent."""
        return sum(
            int(np.prod(size))
            for piece in self.pieces
            for source, size in zip(piece.sources, piece.sizes, strict=True)
            if source is not None
        )


def pieces_between(source: ShardedTensor, target: ShardedTensor) -> Pieces:
    """Find the pieces by which the ranks of `target` get what they store of those of `source`.

    No rank gets an entry twice, or one that it does not store; of ranks that store the same, those
    that need it get it of different ones, as far as there are.

    Raises:
        SpecError: the source does not store what the target needs.
    """
    dims = range(len(target.shape))
    shards = [_shards(source, dim) for dim in dims]
    along = [
        [_along(target.indices(rank, dim), shards[dim]) for dim in dims]
        for rank in range(target.num_ranks)
    ]
    grid = tuple(max(len(rank[dim].parts) for rank in along) for dim in dims)
    storing: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for rank in range(source.num_ranks):
        storing.setdefault(tuple(source.shard(rank, dim) for dim in dims), []).append(rank)
    pieces = []
    for cell in itertools.product(*map(range, grid)):
        sources: list[int | None] = []
        taken: list[Positions] = []
        for rank, parts in enumerate(along):
            found = [
                each.parts[i] if i < len(each.parts) else _NONE
                for each, i in zip(parts, cell, strict=True)
            ]
            taken.append(tuple(part.positions for part in found))
            if any(part is _NONE for part in found):
                sources.append(None)
            else:
                same = storing[tuple(part.shard for part in found)]
                sources.append(same[rank % len(same)])
        sizes = tuple(tuple(len(p) for p in positions) for positions in taken)
        pieces.append(Piece(tuple(sources), tuple(taken), sizes))
    order = tuple(tuple(each.order for each in rank) for rank in along)
    return Pieces(grid, tuple(pieces), order)


@dataclasses.dataclass(frozen=True)
class _Part:
    """Part along one dimension that comes of one shard."""

    shard: tuple[int, ...]
    positions: np.ndarray


_NONE = _Part((), np.zeros(0, np.int64))


@dataclasses.dataclass(frozen=True)
class _Along:
    """The sources of a rank's entries along one dimension."""

    parts: Sequence[_Part]
    order: np.ndarray


def _shards(tensor: ShardedTensor, dim: int) -> dict[tuple[int, ...], np.ndarray]:
    return {tensor.shard(r, dim): tensor.indices(r, dim) for r in range(tensor.num_ranks)}


def _along(stored: np.ndarray, shards: Mapping[tuple[int, ...], np.ndarray]) -> _Along:
    """The parts that hold `stored` entries of a dimension; -1 may be any entry."""
    needed = np.unique(stored[stored >= 0])
    if not len(needed) and len(stored):  # all padding: one entry stands for it
        shard = next(shard for shard, indices in shards.items() if len(indices))
        return _Along([_Part(shard, np.zeros(1, np.int64))], np.zeros(len(stored), np.int64))
    parts, joined = [], []
    left = needed
    for shard, indices in shards.items():
        at = np.flatnonzero(np.isin(indices, left))
        if len(at):
            parts.append(_Part(shard, at))
            joined.append(indices[at])
            left = np.setdiff1d(left, indices[at])
    if len(left):
        raise SpecError(f"Nobody stores the entries {left.tolist()}.")
    order = {int(index): i for i, index in enumerate(np.concatenate(joined))} if joined else {}
    last = max(order, default=0)
    return _Along(parts, np.array([order[int(i) if i >= 0 else last] for i in stored], np.int64))
