"""Variables of which several ranks hold a copy, and when two copies agree."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import NamedTuple

import tensorflow as tf

from tfpar.spec import Mesh, Replicate, RuntimeMismatchError, Shard, Spec, format_spec
from tfpar.tf.runtime.ranks import Ranks
from tfpar.tf.variables.parallel_variable import ParallelVariable

logger = logging.getLogger("tfpar")

AGREEMENT = {8: 1e-8, 4: 1e-3, 2: 1e-1}
"""Largest difference between ranks, relative to the variable's largest value, by bytes per
element. Replicated sums run on every rank by themselves, and CPU and GPU kernels may add in any
order, so that equality to the bit cannot be asked for (empirical)."""

NOISE = 1e-2
"""Differences below this share of the model's largest weight are a warning: adaptive optimizers
blow up the rounding of gradients that are truly zero (the bias of attention keys)."""


class PlacedVariable(NamedTuple):
    """A variable, and how the plan lays it on some ranks."""

    variable: ParallelVariable
    spec: Spec
    mesh: Mesh
    ranks: Ranks


class Copies:
    """A variable of which several ranks hold the same shard."""

    def __init__(self, placed: PlacedVariable) -> None:
        self.variable, self.spec, self.mesh, ranks = placed
        self.members = ranks.members
        variable = self.variable
        self.is_weight = bool(variable.dtype.is_floating and variable.shape.rank)
        self.is_on_all = ranks.is_everyone and not any(isinstance(p, Shard) for p in self.spec)

    @property
    def shards(self) -> dict[int, tf.Variable]:
        """Shards that the ranks of this process use, by rank in the job."""
        return {self.members[rank]: shard for rank, shard in self.variable.shards.items()}

    @property
    def shard_bytes(self) -> int:
        """Bytes of each rank's shard; of the largest, where shards differ."""
        lengths = list(self.variable.shape)
        for axis, placement in enumerate(self.spec):
            if isinstance(placement, Shard):
                lengths[placement.dim] = -(-lengths[placement.dim] // self.mesh.shape[axis])
        return math.prod(lengths) * self.variable.dtype.size

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Ranks of the job that differ only in replicated axes."""
        axes = tuple(a for a, p in enumerate(self.spec) if isinstance(p, Replicate))
        holders = self.variable.holders
        for group in self.mesh.groups(axes):
            for rank in group[1:]:
                if holders[rank] != holders[group[0]]:
                    yield self.members[group[0]], self.members[rank]

    def agree(self, apart: float, own: float) -> bool:
        """Whether roundings of its dtype explain that two copies are `apart`.

        Args:
            own: how large the values of a copy are.
        """
        dtype = self.variable.dtype
        inexact = dtype.is_floating or dtype.is_complex
        return bool(inexact) and apart <= AGREEMENT.get(dtype.size, 0.0) * own

    def judge(
        self, ranks: tuple[int, int], apart: float, own: float, largest: float, advice: str
    ) -> bool:
        """Whether two copies that are `apart` agree; False after a warning.

        Args:
            ranks: that have them, of the job.
            own: how large the values of the copy are.
            largest: how large those of the model's weights.
            advice: the end of the error's message.

        Raises:
            RuntimeMismatchError: they differ by more than noise does.
        """
        if self.agree(apart, own):
            return True
        dtype = self.variable.dtype
        message = (
            f"Ranks {ranks[0]} and {ranks[1]} hold different values of {self.variable.name!r}, "
            f"which is replicated between them ({format_spec(self.spec)} on {self.mesh}): "
            f"{apart:.1e} apart."
        )
        if not (dtype.is_floating or dtype.is_complex) or not apart <= NOISE * largest:
            raise RuntimeMismatchError(f"{message} {advice}")
        logger.warning("%s Its gradient is noise, or its sums are ill-conditioned.", message)
        return False
