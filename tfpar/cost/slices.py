"""Choice of the tensors that go from stage to stage in slices.

k ranks of a stage hold the same tensor of n bytes, and so are k ranks of the next one to:

    whole       each sends it to its like                    n bytes from each rank
    in slices   each sends a k-th of it to its like,         n / k bytes from each rank,
                and these gather it                          and an all-gather of n bytes

The second is faster where links between stages are slower than those within them, as where stages
lie on different machines (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
Clusters Using Megatron-LM", 2021, §4.1: scatter/gather optimization).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence

from tfpar.cluster.description import Cluster
from tfpar.cost.collectives import collective_seconds, transfer_seconds
from tfpar.spec import Mesh, Replicate, Spec

Axes = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class ScatterGatherCost:
    """Prices of tensors from one stage to another, whole and in slices.

    Attributes:
        mesh: of the ranks of each stage.
        cluster: of all ranks; those of actor a are the a-th `mesh.size`.
    """

    mesh: Mesh
    cluster: Cluster

    def axes(
        self, spec: Spec, parts: Sequence[Sequence[int]], num_bytes: int, source: int, target: int
    ) -> Axes:
        """Choose the mesh axes whose ranks each send a slice of a tensor; none where it goes whole.

        Args:
            spec: of the tensor; what lies behind the axes of the mesh is not looked at.
            parts: the shape of what ranks have of it, of each kind of them (`Mesh.views`): all
                slice it alike, as suits the largest part.
            num_bytes: of an entry.
            source, target: actors.
        """
        if self.cluster.one_memory:
            return ()  # nothing is copied on the way
        counts = [math.prod(part) for part in parts]
        ways = [(), *self._ways(spec, counts)]
        most = num_bytes * max(counts)
        return min(ways, key=lambda axes: self.seconds(axes, most, source, target))

    def _ways(self, spec: Spec, counts: Sequence[int]) -> Iterator[Axes]:
        """The sets of axes over which so many entries can be shared out in equal slices."""
        placed = enumerate(zip(spec, self.mesh.shape, strict=False))
        alike = [axis for axis, (p, size) in placed if isinstance(p, Replicate) and size > 1]
        for number in range(1, len(alike) + 1):
            for axes in itertools.combinations(alike, number):
                if math.gcd(*counts) % self.mesh.group_size(axes) == 0:
                    yield axes

    def seconds(self, axes: Axes, num_bytes: float, source: int, target: int) -> float:
        """Price a tensor sent in slices over `axes`, until all ranks of `target` have it."""
        size = self.mesh.size
        pairs = [(source * size + rank, target * size + rank) for rank in range(size)]
        sent = transfer_seconds(pairs, num_bytes / self.mesh.group_size(axes), self.cluster)
        return sent + self.gather_seconds(axes, num_bytes, target)

    def gather_seconds(self, axes: Axes, num_bytes: float, actor: int) -> float:
        """Price the gather by which the ranks of `actor` get a tensor of which each has a slice."""
        part = _part(self.cluster, self.mesh.size, actor)
        return collective_seconds("all_gather", axes, num_bytes, self.mesh, part)


@functools.lru_cache(maxsize=1024)
def _part(cluster: Cluster, size: int, actor: int) -> Cluster:
    """The machines of an actor of so many ranks."""
    return cluster.part(range(actor * size, (actor + 1) * size))
