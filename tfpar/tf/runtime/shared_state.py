"""Comparison, during training, of the copies that ranks hold of a step's variables.

A step gives all ranks that hold a copy of something the same. It is another on one of them if it
was changed outside of steps there alone, as by a callback under `if rank == 0`. Ranks compare

- fingerprints of their copies: of all of them after the first step, later of as many bytes as cost
  next to nothing, of large variables a part that moves on from time to time;
- how often each variable was assigned from outside, and for one that was cut into shards, what:
  no other rank has a copy of a shard.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf

from tfpar.spec import RuntimeMismatchError
from tfpar.tf.interop.fingerprints import fingerprint, traits
from tfpar.tf.runtime.copies import Copies, PlacedVariable

if TYPE_CHECKING:
    from tfpar.tf.distributed.world import World

BUDGET_BYTES = 8_000_000
"""Of copies that are looked at each time, after the first: about a millisecond."""

_LEAST_BYTES = 256  # of each variable that are looked at each time
_GROWTH = 10.0
"""By how much roundings may move copies further apart from one time to the next: where they have
done so once, they go on."""

_ON_ONE_RANK = (
    "What one rank sets, the others do not get: have all ranks do it. Look for a callback, or "
    "other code, that runs on some ranks only (`if rank == 0`)"
)


_UNKNOWN = (math.nan, math.nan)  # traits of what was not cut into shards


class SharedState:
    """Variables of a step as this rank holds them, to be compared with the others'.

    Args:
        placed: the variables, the same on every rank.
        world: the processes.
        budget_bytes: of copies to look at each time.
    """

    def __init__(
        self, placed: Sequence[PlacedVariable], world: World, budget_bytes: int = BUDGET_BYTES
    ) -> None:
        self._world = world
        # Compared are those that have copies.
        self._copies = sorted(map(Copies, placed), key=lambda copies: not any(copies.pairs()))
        self._pairs = np.array(
            [(i, *ranks) for i, copies in enumerate(self._copies) for ranks in copies.pairs()], int
        ).reshape(-1, 3)
        compared = self._copies[: len({*self._pairs[:, 0]})]
        self._num_compared = len(compared)
        self._shards = [copies.shards.get(world.rank) for copies in self._copies]
        self._lengths = np.array([0 if s is None else _length(s) for s in self._shards])
        limit = _limit([copies.shard_bytes for copies in compared], budget_bytes)
        sizes = [-(-limit // copies.variable.dtype.size) for copies in self._copies]
        self._sizes = np.minimum(self._lengths, sizes)
        self._apart: dict[tuple[int, ...], float] = {}
        self._times: np.ndarray | int = 0  # by rank and variable, at the last time
        self._fingerprints: Callable[[tf.Tensor], tf.Tensor] | None = None

    def compare(self, when: str, turn: int | None = None) -> None:
        """Check that ranks agree; all call it together, after the same step, within `World.at`.

        Args:
            when: of the steps since the last time: `in train steps 5 to 9`.
            turn: which part of large variables is looked at, the same on every rank; None: all.

        Raises:
            RuntimeMismatchError: on every rank; names the first variable and the ranks that differ,
                and what may have brought it about.
        """
        if not self._copies:
            return
        assigned, windows = [c.variable.assigned for c in self._copies], self._windows(turn)
        prints = self._looked_at(windows, turn)
        own = np.array([(each.times, *(each.value or _UNKNOWN)) for each in assigned])
        told = self._gathered(np.concatenate([prints, own.T.reshape(-1).view(np.int64)]))
        prints, assigned_there = np.split(told, [len(prints)], axis=1)
        times, *values = assigned_there.view(np.float64).reshape(len(told), 3, -1).swapaxes(0, 1)
        since, self._times = times - self._times, times
        self._check_split(times, np.stack(values), when)
        places, first, other = self._pairs.T
        differing = self._pairs[prints[first, places] != prints[other, places]]
        if differing.size:
            self._judge(windows, differing, since.astype(int), when)

    def _gathered(self, own: np.ndarray) -> np.ndarray:
        """All-gather an array; return those of all ranks, stacked by rank."""
        told = self._world.exchange.all_gather(tf.constant(own))
        return np.stack([each.numpy() for each in told])

    def _check_split(self, times: np.ndarray, values: np.ndarray, when: str) -> None:
        """Check that all ranks were given the same of what some have no copy of.

        Args:
            times: how often each variable was assigned, by rank and variable.
            values: the `Traits` of what it was given, by trait, rank and variable.
        """
        for i, copies in enumerate(self._copies):
            if copies.is_on_all:
                continue
            name = copies.variable.name
            if len({*times[:, i]}) > 1:
                who = _assigners(name, times[:, i].astype(int).tolist())
                raise RuntimeMismatchError(
                    f"{who} {when}. It does not lie whole on every rank, so that its parts belong "
                    f"to different values now. {_ON_ONE_RANK}."
                )
            projections, sizes = values[..., i]
            for rank, apart in enumerate(np.abs(projections - projections[0])):
                # No number where a rank has cut none.
                if apart > 0 and not copies.agree(float(apart), float(sizes[0])):
                    raise RuntimeMismatchError(
                        f"Ranks 0 and {rank} have given {name!r} different values ({apart:.1e} "
                        f"apart), of which each has kept its part. Have all ranks assign the same "
                        f"value, seeding what is random."
                    )

    # --- copies ------------------------------------------------------------------------------

    def _windows(self, turn: int | None) -> np.ndarray:
        """(begin, size) of what is looked at of each flat shard; of the same shard on other ranks
        the same."""
        if turn is None:
            return np.stack([np.zeros_like(self._lengths), self._lengths])
        counts = -(-self._lengths // np.maximum(self._sizes, 1))
        begins = turn % np.maximum(counts, 1) * self._sizes
        return np.stack([np.minimum(begins, self._lengths - self._sizes), self._sizes])

    def _looked_at(self, windows: np.ndarray, turn: int | None) -> np.ndarray:
        """The fingerprint (int64) of each window of what is compared; 0 where this rank has no
        shard."""
        found = np.zeros(self._num_compared, np.int64)
        shards = {i: s for i, s in enumerate(self._shards[: self._num_compared]) if s is not None}
        present = [*shards]
        if turn is None:
            found[present] = [fingerprint(shard.read_value()) for shard in shards.values()]
        elif present:
            begins, sizes = windows[:, present]
            if self._fingerprints is None:  # which takes longer than to look once
                self._fingerprints = _traced([*shards.values()], sizes.tolist())
            found[present] = self._fingerprints(tf.constant(begins, tf.int64)).numpy()
        return found

    def _judge(
        self,
        windows: np.ndarray,
        differing: np.ndarray,
        assigned: np.ndarray,
        when: str,
    ) -> None:
        """Check that roundings explain how far copies are apart whose fingerprints differ.

        Args:
            differing: rows of the place of a variable, and two ranks that have copies of it.
            assigned: how often it was since the last time, by rank and variable.
        """
        own = [traits(self._entries(i, *window)) for i, window in enumerate(windows.T.tolist())]
        told = self._gathered(np.array(own))
        weights = [i for i, copies in enumerate(self._copies) if copies.is_weight]
        largest = max((each[i, 1] for each in told for i in weights), default=0.0)
        # What one rank has assigned is the cause of all else.
        changed = (assigned != assigned[:1]).any(axis=0)
        for i, *ranks in sorted(differing.tolist(), key=lambda each: not changed[each[0]]):
            copies, name = self._copies[i], self._copies[i].variable.name
            first, other = (told[rank][i] for rank in ranks)
            key = (i, ranks[0], ranks[1])
            apart, before = abs(first[0] - other[0]), self._apart.get(key, 0.0)
            self._apart[key] = apart
            if changed[i]:
                is_one = copies.variable.shape.rank == 0
                sizes = f"it has the sizes {first[1]:g} and {other[1]:g}"
                between = sizes if is_one else f"its values are {apart:.1e} apart"
                raise RuntimeMismatchError(
                    f"{_assigners(name, assigned[:, i].tolist())} {when}: {between} on ranks "
                    f"{ranks[0]} and {ranks[1]}, which hold a copy each. {_ON_ONE_RANK}."
                )
            if math.isnan(first[0]) and math.isnan(other[0]):
                continue  # a training that has diverged, on both
            if apart > _GROWTH * before:
                advice = (
                    f"They have come apart {when}. {_ON_ONE_RANK}. If there is none, please report "
                    f"it with the model."
                )
                copies.judge((ranks[0], ranks[1]), apart, first[1], largest, advice)

    def _entries(self, i: int, begin: int, size: int) -> np.ndarray:
        shard = self._shards[i]
        if shard is None:
            return np.zeros(0)
        flat = tf.reshape(shard.read_value(), [-1])
        return np.asarray(flat[begin : begin + size])


def _limit(sizes: Sequence[int], budget: int) -> int:
    """The bytes of each variable that are looked at if all, of these sizes, share a budget: those
    of the small ones, which need no more, and of the others as many each."""
    left = budget
    for done, size in enumerate(sorted(sizes)):
        if size * (len(sizes) - done) > left:
            return max(_LEAST_BYTES, left // (len(sizes) - done))
        left -= size
    return max([_LEAST_BYTES, *sizes])


def _length(shard: tf.Variable) -> int:
    return int(shard.shape.num_elements())


def _traced(shards: Sequence[tf.Variable], sizes: Sequence[int]) -> Callable[..., tf.Tensor]:
    """A function of where windows begin that gives their fingerprints (int64)."""

    @tf.function(
        input_signature=[tf.TensorSpec([len(shards)], tf.int64)],
        autograph=False,
        reduce_retracing=False,
    )
    def fingerprints(begins: tf.Tensor) -> tf.Tensor:
        made = []
        for begin, shard, size in zip(tf.unstack(begins), shards, sizes, strict=True):
            with tf.device(shard.device):
                looked_at = tf.reshape(shard.read_value(), [1, -1])
                if size < _length(shard):
                    looked_at = tf.slice(looked_at, [0, begin], [1, size])
            with tf.device("CPU:0"):
                made.append(tf.raw_ops.Fingerprint(data=looked_at, method="farmhash64"))
        with tf.device("CPU:0"):
            return tf.bitcast(tf.concat(made, axis=0), tf.int64)

    return fingerprints.get_concrete_function()


# --- messages ------------------------------------------------------------------------------


def _assigners(name: str, times: Sequence[int]) -> str:
    """Describe which ranks assigned a variable more often than others did."""
    common = max(set(times), key=lambda n: (times.count(n), -n))
    odd = [rank for rank, n in enumerate(times) if n != common]
    ranks = f"rank{'s' * (len(odd) > 1)} {', '.join(map(str, odd))}"
    if all(times[rank] < common for rank in odd):
        return f"All ranks but {ranks} have assigned a value to {name!r}"
    return f"Only {ranks} assigned a value to {name!r}"
