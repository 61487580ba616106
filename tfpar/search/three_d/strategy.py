"""`Strategy`: degrees, placement, microbatch size and layers of each stage (auto3d, §4.1)."""

from __future__ import annotations

import dataclasses
import itertools

from tfpar.spec import PlanError
from tfpar.spec.arguments import integer


@dataclasses.dataclass(frozen=True)
class Strategy:
    """How a model is trained on a cluster.

    Attributes:
        data: how many copies of the pipeline share the batch.
        tensor: over how many ranks each layer is split.
        microbatch: samples of a microbatch, of each copy.
        counts: layers of each stage.
        ranks: of the cluster, for (stage, copy, part of a layer), the last of them the fastest; by
            default the cluster's first in their order.

    Raises:
        PlanError: another number of ranks than the degrees need, one of them twice, or a stage
            without layers.
    """

    data: int
    tensor: int
    microbatch: int
    counts: tuple[int, ...]
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("data", "tensor", "microbatch"):
            integer(name, getattr(self, name), 1)
        if not self.counts or min(self.counts) < 1:
            raise PlanError(f"Stages have {self.counts} layers: each has one at least.")
        if not self.ranks:
            object.__setattr__(self, "ranks", tuple(range(self.size)))
        if len(self.ranks) != self.size or len(set(self.ranks)) != self.size:
            raise PlanError(
                f"{self.stages} stages x {self.data} data x {self.tensor} tensor need {self.size} "
                f"different ranks; the placement has {len(set(self.ranks))}."
            )

    def __str__(self) -> str:
        layers = "+".join(map(str, self.counts))
        return (
            f"{self.stages} stages x {self.data} data x {self.tensor} tensor, "
            f"microbatches of {self.microbatch}, layers {layers}"
        )

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.counts)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.stages * self.data * self.tensor

    @property
    def runs(self) -> tuple[range, ...]:
        """The layers of each stage."""
        ends = itertools.accumulate(self.counts)
        return tuple(range(end - n, end) for n, end in zip(self.counts, ends, strict=True))

    def stage(self, number: int) -> tuple[int, ...]:
        """The ranks of a stage, copy by copy."""
        size = self.data * self.tensor
        return self.ranks[number * size : (number + 1) * size]

    def microbatches(self, batch: int) -> int:
        """In how many microbatches each copy runs its part of a batch of `batch` samples.

        Raises:
            PlanError: they do not come out even.
        """
        integer("batch", batch, 1)
        found, rest = divmod(batch, self.data * self.microbatch)
        if rest:
            raise PlanError(
                f"A batch of {batch} does not divide into {self.data} copies x microbatches of "
                f"{self.microbatch}."
            )
        return found
