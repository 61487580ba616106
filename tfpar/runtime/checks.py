"""What is checked after a program's first step: variables lie as planned, and ranks agree."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import tensorflow as tf

from tfpar.runtime.ranks import Ranks
from tfpar.spec import Mesh, Replicate, RuntimeMismatchError, Spec, format_spec
from tfpar.variables.parallel_variable import ParallelVariable

if TYPE_CHECKING:
    from tfpar.distributed.world import World

logger = logging.getLogger("tfpar")


class Placed(NamedTuple):
    """A variable, and how the plan lays it on some ranks."""

    variable: ParallelVariable
    spec: Spec
    mesh: Mesh
    ranks: Ranks


def check_placement(placed: Sequence[Placed], world: World | None) -> None:
    """Check that every variable lies where the plan says and that ranks agree.

    Args:
        world: the processes; None if there is one.

    Raises:
        RuntimeMismatchError: names the first variable and rank that differ.
    """
    for variable, spec, mesh, ranks in placed:
        lain_on = None if variable.ranks is None else variable.ranks.members
        if variable.layout != (mesh, spec) or lain_on != ranks.members:
            raise RuntimeMismatchError(
                f"Variable {variable.name!r} is laid as {variable.layout} on the ranks {lain_on}, "
                f"not as the plan's {format_spec(spec)} on {mesh}, the ranks {ranks.members}."
            )
        for rank, shard in variable.shards.items():
            device = ranks.devices[variable.holders[rank]]
            if not shard.device.endswith(device.rpartition("/")[2]):
                raise RuntimeMismatchError(
                    f"The shard of variable {variable.name!r} for rank {ranks.members[rank]} lies "
                    f"on {shard.device}, not on {device}."
                )
    copies = [_Copies(one) for one in placed]
    if world is None:
        _check_here(copies)
    else:
        _check_between(copies, world)


AGREEMENT = {8: 1e-8, 4: 1e-3, 2: 1e-1}
"""Largest difference between ranks, relative to the variable's largest value, by bytes per
element. Replicated sums run on every rank by themselves, and CPU and GPU kernels may add in any
order, so that equality to the bit cannot be asked for (empirical)."""

NOISE = 1e-2
"""Differences below this share of the model's largest weight are a warning: adaptive optimizers
blow up the rounding of gradients that are truly zero (the bias of attention keys)."""


class _Copies:
    """A variable of which several ranks hold the same shard."""

    def __init__(self, placed: Placed) -> None:
        self.variable, self.spec, self.mesh, ranks = placed
        self.members = ranks.members
        variable = self.variable
        self.is_weight = bool(variable.dtype.is_floating and variable.shape.rank)

    @property
    def shards(self) -> dict[int, tf.Variable]:
        """What each rank of this process uses, by its rank in the job."""
        return {self.members[rank]: shard for rank, shard in self.variable.shards.items()}

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Ranks of the job that differ only in replicated axes."""
        axes = tuple(a for a, p in enumerate(self.spec) if isinstance(p, Replicate))
        holders = self.variable.holders
        for group in self.mesh.groups(axes):
            for rank in group[1:]:
                if holders[rank] != holders[group[0]]:
                    yield self.members[group[0]], self.members[rank]

    def judge(self, ranks: tuple[int, int], apart: float, own: float, largest: float) -> bool:
        """Whether two copies that are `apart` agree; False after a warning.

        Args:
            ranks: that have them, of the job.
            own: how large the values of the copy are.
            largest: how large those of the model's weights.
        """
        dtype = self.variable.dtype
        inexact = dtype.is_floating or dtype.is_complex
        if inexact and apart <= AGREEMENT.get(dtype.size, 0.0) * own:
            return True
        message = (
            f"Ranks {ranks[0]} and {ranks[1]} hold different values of {self.variable.name!r}, "
            f"which is replicated between them ({format_spec(self.spec)} on {self.mesh}): "
            f"{apart:.1e} apart."
        )
        if not inexact or apart > NOISE * largest:
            raise RuntimeMismatchError(f"{message} Please report it with the model.")
        logger.warning("%s Its gradient is noise, or its sums are ill-conditioned.", message)
        return False


def _check_here(copies: Sequence[_Copies]) -> None:
    """All ranks are in this process."""
    weights = [next(iter(copy.shards.values())) for copy in copies if copy.is_weight]
    largest: float | None = None  # takes long for a large model, and copies mostly are the same
    for copy in copies:
        shards = copy.shards
        for ranks in copy.pairs():
            first, other = (_value(shards[rank]) for rank in ranks)
            if np.array_equal(first, other, equal_nan=first.dtype.kind in "fc"):
                continue
            if largest is None:
                largest = max((_largest(_value(weight)) for weight in weights), default=0.0)
            if not copy.judge(ranks, _difference(first, other), _largest(first), largest):
                break


def _check_between(copies: Sequence[_Copies], world: World) -> None:
    """Each rank is a process: they compare checksums, and where some differ a few numbers that tell
    how far shards are apart."""
    compared = [copy for copy in copies if any(copy.pairs())]
    if not compared:
        return
    sums = _of_all_ranks(compared, _checksum, world)
    pairs = ((i, pair) for i, copy in enumerate(compared) for pair in copy.pairs())
    if all(sums[first][i] == sums[other][i] for i, (first, other) in pairs):
        return
    traits = _of_all_ranks(copies, _traits, world)
    weights = [i for i, copy in enumerate(copies) if copy.is_weight]
    largest = max((t[i, 2] for t in traits for i in weights), default=0.0)
    for i, copy in enumerate(copies):
        for ranks in copy.pairs():
            first, other = (traits[rank][i] for rank in ranks)
            apart = abs(first[1] - other[1])
            if first[0] != other[0] and not copy.judge(ranks, apart, first[2], largest):
                break


def _of_all_ranks(
    copies: Sequence[_Copies], tell: Callable[[np.ndarray], Sequence[float]], world: World
) -> list[np.ndarray]:
    """By rank of the job, what `tell` says of its shard of each variable; zeros where a rank has
    none."""
    shards = [copy.shards.get(world.rank) for copy in copies]
    nothing = [0.0] * len(tell(np.zeros(1)))
    own = np.array([nothing if shard is None else tell(_value(shard)) for shard in shards])
    with world.at("comparing variables"):
        return [told.numpy() for told in world.exchange.all_gather(tf.constant(own))]


def _value(shard: tf.Variable) -> np.ndarray:
    """What a shard holds, to be read: on a CPU without a copy."""
    return np.asarray(shard.read_value())


def _checksum(value: np.ndarray) -> Sequence[float]:
    """Of the bytes."""
    return (float(zlib.crc32(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)),)


def _traits(value: np.ndarray) -> Sequence[float]:
    """Checksum of the bytes, mean projection on random signs, and root mean square.

    The projections of two arrays are as far apart, in expectation, as their elements are.
    """
    flat = np.ascontiguousarray(value).reshape(-1)
    numbers = np.abs(flat) if flat.dtype.kind == "c" else flat.astype("float64")
    signs = np.random.default_rng(0).integers(0, 2, numbers.size, np.int8) * 2 - 1
    root = max(1, numbers.size) ** 0.5
    return *_checksum(flat), float(numbers @ signs) / root, float(np.linalg.norm(numbers)) / root


def _largest(value: np.ndarray) -> float:
    return float(np.max(np.abs(value.astype("float64")), initial=0.0))


def _difference(first: np.ndarray, other: np.ndarray) -> float:
    return float(np.max(np.abs(first.astype("float64") - other.astype("float64"))))
